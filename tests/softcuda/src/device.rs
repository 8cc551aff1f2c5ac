//! The devices and their attributes.
#![allow(
    unsafe_code,
    reason = "results are written through the caller's pointers"
)]

use std::ffi::c_char;

use crate::error::{CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, Outcome};

/// How many devices there are.
pub(crate) const DEVICES: usize = 2;

/// Most threads of a block.
pub(crate) const MAX_THREADS: u32 = 1024;

/// Largest block in each dimension.
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];

/// Largest grid in each dimension.
pub(crate) const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Most shared memory of a block, in bytes.
pub(crate) const MAX_SHARED: u32 = 48 * 1024;

/// Index of a device.
pub(crate) fn index(device: i32) -> Outcome<usize> {
    usize::try_from(device)
        .ok()
        .filter(|&index| index < DEVICES)
        .ok_or(CUDA_ERROR_INVALID_DEVICE)
}

/// Writes an answer.
///
/// # Safety
/// `to` is null or may be written.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller promises that it may be written.
    unsafe { to.write(value) };
    Ok(())
}

/// `cuDeviceGetName`: cut where the caller's buffer ends.
///
/// # Safety
/// `name` is null or has room for `len` bytes.
pub(crate) unsafe fn name(name: *mut c_char, len: i32, device: i32) -> Outcome {
    let own = format!("Software CUDA device {}", index(device)?);
    // SAFETY: the caller's promise.
    unsafe { put_cut(name, len, &own) }
}

/// `cuDeviceGetPCIBusId`, as [`attribute`] numbers the bus.
///
/// # Safety
/// As for [`name`].
pub(crate) unsafe fn bus_id(text: *mut c_char, len: i32, device: i32) -> Outcome {
    let own = format!("0000:{:02X}:00.0", index(device)? + 1);
    // SAFETY: the caller's promise.
    unsafe { put_cut(text, len, &own) }
}

/// Writes a text, cut where the caller's buffer ends.
///
/// # Safety
/// As for [`name`].
unsafe fn put_cut(name: *mut c_char, len: i32, own: &str) -> Outcome {
    let room = usize::try_from(len).unwrap_or(0);
    if name.is_null() || room == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let shown = &own.as_bytes()[..own.len().min(room - 1)];
    // SAFETY: the caller promises `room` bytes; what is shown and its end mark are at most that.
    unsafe {
        name.cast::<u8>()
            .copy_from_nonoverlapping(shown.as_ptr(), shown.len());
        name.add(shown.len()).write(0);
    }
    Ok(())
}

/// The value of an attribute, by its number in `CUdevice_attribute`; the numbers of an H100 where
/// they matter.
pub(crate) fn attribute(attribute: u32, device: i32) -> Outcome<i32> {
    let index = index(device)?;
    let value = match attribute {
        1 => MAX_THREADS as i32,                         // MAX_THREADS_PER_BLOCK
        at @ 2..=4 => MAX_BLOCK[at as usize - 2] as i32, // MAX_BLOCK_DIM_X, _Y, _Z
        at @ 5..=7 => MAX_GRID[at as usize - 5] as i32,  // MAX_GRID_DIM_X, _Y, _Z
        8 => MAX_SHARED as i32,                          // MAX_SHARED_MEMORY_PER_BLOCK
        10 => 32,                                        // WARP_SIZE
        15 => 1,                                         // GPU_OVERLAP
        16 => 132,                                       // MULTIPROCESSOR_COUNT
        17 => 0,                                         // KERNEL_EXEC_TIMEOUT
        18 => 0,                                         // INTEGRATED
        19 => 1,                                         // CAN_MAP_HOST_MEMORY
        20 => 0,                                         // COMPUTE_MODE
        31 => 1,                                         // CONCURRENT_KERNELS
        33 => index as i32 + 1,                          // PCI_BUS_ID
        34 => 0,                                         // PCI_DEVICE_ID
        39 => 2048,                                      // MAX_THREADS_PER_MULTIPROCESSOR
        40 => 2,                                         // ASYNC_ENGINE_COUNT
        41 => 1,                                         // UNIFIED_ADDRESSING
        50 => 0,                                         // PCI_DOMAIN_ID
        75 => 9,                                         // COMPUTE_CAPABILITY_MAJOR
        76 => 0,                                         // COMPUTE_CAPABILITY_MINOR
        78 => 1,                                         // STREAM_PRIORITIES_SUPPORTED
        83 => 0,                                         // MANAGED_MEMORY
        88 => 0,                                         // PAGEABLE_MEMORY_ACCESS
        91 => 0,                                         // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        99 => 1,                                         // HOST_REGISTER_SUPPORTED
        100 => 0,  // PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
        106 => 32, // MAX_BLOCKS_PER_MULTIPROCESSOR
        113 => 0,  // READ_ONLY_HOST_REGISTER_SUPPORTED
        115 => 0,  // MEMORY_POOLS_SUPPORTED
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    Ok(value)
}
