//! Element types of KV data, with the codes that record headers carry.

use std::fmt;

crate::named! {
    /// Element type of the KV bytes of a block. The codes, counted from 0, are frozen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    #[repr(u32)]
    pub enum DType {
        /// None of the below.
        Other = "other",
        /// IEEE half precision.
        F16 = "f16",
        /// bfloat16.
        Bf16 = "bf16",
        /// IEEE single precision.
        F32 = "f32",
        /// 8-bit float, 4 exponent bits.
        Fp8E4m3 = "fp8_e4m3",
        /// 8-bit float, 5 exponent bits.
        Fp8E5m2 = "fp8_e5m2",
        /// 8-bit integer.
        Int8 = "int8",
        /// Bytes of a type that only the caller knows.
        #[default]
        Opaque = "opaque",
    }
}

impl DType {
    /// The code in record headers.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The type of a code; `None` if this version does not know the code.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }

    /// Parses a name that frameworks use (`torch.bfloat16`, `float16`, `fp8_e4m3`, `half`). A type
    /// without a code of its own is `Other`.
    pub fn from_name(name: &str) -> Self {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "f16" | "float16" | "half" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            "f32" | "float32" | "float" => Self::F32,
            "fp8" | "fp8_e4m3" | "float8_e4m3fn" => Self::Fp8E4m3,
            "fp8_e5m2" | "float8_e5m2" => Self::Fp8E5m2,
            "int8" => Self::Int8,
            "opaque" => Self::Opaque,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for (code, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype.code(), code as u32);
            assert_eq!(DType::from_code(code as u32), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), dtype);
        }
        assert_eq!(DType::from_code(8), None);
        assert_eq!(DType::from_name("torch.bfloat16"), DType::Bf16);
        assert_eq!(DType::from_name("float64"), DType::Other);
    }
}
