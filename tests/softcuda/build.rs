//! Gives the shared library a unique SONAME.

/// It is opened by its path; a lookup of the real driver by name must not find it. Calls inside the
/// library are bound inside it.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsoftcuda.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
