//! Every form of every opcode on known values, refused input, and the committed kernels against
//! plain copies.

mod forms;
mod kernels;
mod refused;

use std::sync::{Mutex, PoisonError};

use super::{Fault, Memory};

/// Memory of some bytes from an address on.
struct Ram {
    base: u64,
    bytes: Mutex<Vec<u8>>,
}

impl Ram {
    fn new(base: u64, bytes: Vec<u8>) -> Ram {
        Ram {
            base,
            bytes: Mutex::new(bytes),
        }
    }

    fn access(&self, address: u64, len: usize, act: impl FnOnce(&mut [u8])) -> Result<(), Fault> {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let at = address.wrapping_sub(self.base) as usize;
        let place = bytes.get_mut(at..at.saturating_add(len));
        act(place.ok_or(Fault { address, len })?);
        Ok(())
    }
}

impl Memory for Ram {
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.access(address, into.len(), |bytes| into.copy_from_slice(bytes))
    }

    fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault> {
        self.access(address, from.len(), |bytes| bytes.copy_from_slice(from))
    }
}

/// A module of one kernel `f` with three parameters: 64, 32 and 64 bits wide.
fn source(body: &str) -> String {
    format!(
        "// a comment
.version 7.0
.target sm_70
.address_size 64

.visible .entry f(
	.param .u64 f_param_0,
	.param .u32 f_param_1,
	.param .u64 f_param_2
)
.maxntid 256, 1, 1
{{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<8>;
{body}
}}
"
    )
}
