//! Executes PTX: the subset used by the copy kernels (`kernels/copy.ptx`), and similar
//! instructions.
//!
//! A [`Module`] is parsed once; unsupported text is an error with its line. Each [`Kernel`] in it
//! is then a list of instructions over numbered slots, which [`Kernel::run`] executes thread by
//! thread: every thread of a grid runs to its end before the next begins. There are no barriers and
//! no shared memory.
//!
//! Integers follow the PTX manual: every operation has the width and the sign of its type, shifts
//! clamp, and a misaligned access is a [`Fault`], as on a device. The caller provides the memory:
//! [`Memory`].
//!
//! ```
//! use std::sync::Mutex;
//! use softcuda::ptx::{Fault, Memory, Module};
//!
//! /// Sixteen bytes from address 0 on.
//! struct Small(Mutex<[u8; 16]>);
//!
//! impl Memory for Small {
//!     fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
//!         let (bytes, at, len) = (self.0.lock().unwrap(), address as usize, into.len());
//!         into.copy_from_slice(bytes.get(at..at + len).ok_or(Fault { address, len })?);
//!         Ok(())
//!     }
//!     fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault> {
//!         let (mut bytes, at, len) = (self.0.lock().unwrap(), address as usize, from.len());
//!         bytes.get_mut(at..at + len).ok_or(Fault { address, len })?.copy_from_slice(from);
//!         Ok(())
//!     }
//! }
//!
//! let module = Module::parse(
//!     ".version 7.0
//!      .target sm_70
//!      .address_size 64
//!      .visible .entry mark(
//!          .param .u64 mark_param_0
//!      )
//!      {
//!          .reg .b32 %r<2>;
//!          .reg .b64 %rd<4>;
//!          ld.param.u64 %rd1, [mark_param_0];
//!          mov.u32 %r1, %tid.x;
//!          mul.wide.u32 %rd2, %r1, 4;
//!          add.s64 %rd3, %rd1, %rd2;
//!          st.global.u32 [%rd3], %r1;
//!          ret;
//!      }",
//! )
//! .unwrap();
//! let memory = Small(Mutex::new([9; 16]));
//! let kernel = module.kernel("mark").unwrap();
//! assert_eq!(kernel.params(), [8]);
//! kernel.run([1, 1, 1], [3, 1, 1], &4u64.to_le_bytes(), &memory).unwrap();
//! assert_eq!(*memory.0.lock().unwrap(), [9, 9, 9, 9, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
//! ```

mod code;
mod operands;
mod parse;
#[cfg(test)]
mod tests;

pub use code::Kernel;

/// An access outside of device memory, or one not aligned to its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// First byte of the access.
    pub address: u64,
    /// Bytes of the access.
    pub len: usize,
}

/// The memory that a kernel sees.
pub trait Memory: Sync {
    /// Reads the bytes at an address. A fault when not all of them are device memory.
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Writes bytes at an address. A fault when not all of them are device memory; then none is
    /// written.
    fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault>;
}

/// The kernels of one PTX file.
#[derive(Debug)]
pub struct Module {
    kernels: Vec<Kernel>,
}

impl Module {
    /// Parses a file. The error has the line and the unsupported text.
    pub fn parse(text: &str) -> Result<Module, String> {
        Ok(Module {
            kernels: parse::kernels(text)?,
        })
    }

    /// The entry point of that name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name() == name)
    }
}
