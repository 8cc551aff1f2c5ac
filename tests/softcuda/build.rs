//! Names the shared library as its users look it up.

/// The SONAME is what cudarc opens first. It is not `libcuda.so.1`: another library in the process that asks for the real
/// driver must not be given this one. Calls inside the library stay inside, whatever else the process has loaded.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
