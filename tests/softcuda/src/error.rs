//! The driver's result codes, with their names and texts.

use std::ffi::CStr;

/// A result of the driver, as C sees it.
pub type CUresult = u32;

/// Result of the functions behind the exported ones; an error is never [`CUDA_SUCCESS`].
pub(crate) type Outcome<T = ()> = Result<T, CUresult>;

macro_rules! codes {
    ($($name:ident = $value:literal $text:literal;)*) => {
        $(
            #[doc = concat!("\"", $text, "\"")]
            pub const $name: CUresult = $value;
        )*

        /// Name and text of a code.
        fn known(code: CUresult) -> Option<(&'static str, &'static str)> {
            match code {
                $($value => Some((concat!(stringify!($name), "\0"), concat!($text, "\0"))),)*
                _ => None,
            }
        }
    };
}

codes! {
    CUDA_SUCCESS = 0 "no error";
    CUDA_ERROR_INVALID_VALUE = 1 "invalid argument";
    CUDA_ERROR_OUT_OF_MEMORY = 2 "out of memory";
    CUDA_ERROR_NOT_INITIALIZED = 3 "initialization error";
    CUDA_ERROR_DEINITIALIZED = 4 "driver shutting down";
    CUDA_ERROR_NO_DEVICE = 100 "no CUDA-capable device is detected";
    CUDA_ERROR_INVALID_DEVICE = 101 "invalid device ordinal";
    CUDA_ERROR_INVALID_IMAGE = 200 "device kernel image is invalid";
    CUDA_ERROR_INVALID_CONTEXT = 201 "invalid device context";
    CUDA_ERROR_ECC_UNCORRECTABLE = 214 "uncorrectable ECC error encountered";
    CUDA_ERROR_INVALID_PTX = 218 "a PTX JIT compilation failed";
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222 "the provided PTX was compiled with an unsupported \
    toolchain.";
    CUDA_ERROR_OPERATING_SYSTEM = 304 "OS call failed or operation not supported on this OS";
    CUDA_ERROR_INVALID_HANDLE = 400 "invalid resource handle";
    CUDA_ERROR_NOT_FOUND = 500 "named symbol not found";
    CUDA_ERROR_NOT_READY = 600 "device not ready";
    CUDA_ERROR_ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered";
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701 "too many resources requested for launch";
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709 "context is destroyed";
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712 "part or all of the requested memory range is \
    already mapped";
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713 "pointer does not correspond to a registered \
    memory region";
    CUDA_ERROR_LAUNCH_FAILED = 719 "unspecified launch failure";
    CUDA_ERROR_NOT_PERMITTED = 800 "operation not permitted";
    CUDA_ERROR_NOT_SUPPORTED = 801 "operation not supported";
    CUDA_ERROR_SYSTEM_NOT_READY = 802 "system not yet initialized";
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900 "operation not permitted when stream is capturing";
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901 "operation failed due to a previous error during \
    capture";
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908 "a capture is ended by the thread that began it";
    CUDA_ERROR_UNKNOWN = 999 "unknown error";
}

/// Name of a code, as `cuGetErrorName` gives it.
pub(crate) fn name(code: CUresult) -> Option<&'static CStr> {
    CStr::from_bytes_with_nul(known(code)?.0.as_bytes()).ok()
}

/// Text of a code, as `cuGetErrorString` gives it.
pub(crate) fn text(code: CUresult) -> Option<&'static CStr> {
    CStr::from_bytes_with_nul(known(code)?.1.as_bytes()).ok()
}
