//! The instruction sets of the kernels, detected at run time.

use std::sync::OnceLock;

use ucm_core::{Error, ErrorKind, Result};

ucm_core::named! {
    /// An instruction set. Every kernel of this crate supports each of them; the smallest is first.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Isa {
        /// Plain Rust, one number at a time. It runs anywhere; the others are tested against it.
        Scalar = "scalar",
        /// x86-64 with AVX2, FMA, F16C and POPCNT.
        Avx2 = "avx2",
        /// x86-64 with AVX-512 F, BW, DQ, VL and VPOPCNTDQ, and all of [`Isa::Avx2`].
        Avx512 = "avx512",
    }
}

impl Isa {
    /// The largest set of this processor.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let found = Self::ALL.into_iter().rev().find(|isa| isa.supported());
            found.unwrap_or(Self::Scalar)
        })
    }

    /// True if this processor has it.
    pub fn supported(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vpopcntdq")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// Parses a name; `auto` is the largest set of this processor.
    ///
    /// # Errors
    ///
    /// `InvalidInput` for another name, `Unsupported` if this processor lacks it.
    ///
    /// ```
    /// use ucm_retrieval::Isa;
    ///
    /// assert_eq!(Isa::from_name("auto").unwrap(), Isa::best());
    /// assert_eq!(Isa::from_name("scalar").unwrap(), Isa::Scalar);
    /// assert!(Isa::from_name("sse9").is_err());
    /// ```
    pub fn from_name(name: &str) -> Result<Self> {
        if name == "auto" {
            return Ok(Self::best());
        }
        let isa = Self::of_name(name).ok_or_else(|| {
            Error::invalid("an instruction set is auto, scalar, avx2 or avx512").with("isa", name)
        })?;
        isa.checked()
    }

    /// Itself, if this processor has it.
    pub(crate) fn checked(self) -> Result<Self> {
        if self.supported() {
            return Ok(self);
        }
        let text = "this processor lacks the instruction set; use auto";
        Err(Error::new(ErrorKind::Unsupported, text).with("isa", self.name()))
    }
}
