//! Names the shared library as nobody else looks for one.

/// It is opened by its path; whoever asks for the real driver by name must not be given this one.
/// Calls inside the library stay inside, whatever else the process has loaded.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsoftcuda.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
