//! Libraries of vendors, found at run time, and their functions by name.
#![allow(unsafe_code, reason = "loads libraries and looks up their functions")]

use std::ffi::c_int;
use std::path::Path;
use std::sync::OnceLock;

use libloading::AsFilename;
use libloading::os::unix::Library;
use tracing::warn;
use ucm_core::{Error, ErrorKind, Result};

use crate::fork::Origin;

/// Tests name a library here that replaces the vendor's.
const TEST_LIBRARY: &str = "UCM_TEST_DRIVER";

/// A library is never unloaded: a runtime has threads of its own.
const MODE: c_int = libc::RTLD_NOW | libc::RTLD_NODELETE;

/// Any function of a library; it is called by its own type.
pub(super) type Function = unsafe extern "C" fn();

/// Where to find a vendor's library.
pub(crate) struct Places {
    /// A function that only this library has: if it is a global symbol of the process, the library
    /// is loaded.
    pub(crate) known_by: Option<&'static str>,
    /// Its names, the most likely one first.
    pub(crate) names: &'static [&'static str],
    /// An environment variable that names a directory, and a path below it, to try before the
    /// loader's search.
    pub(crate) below: Option<(&'static str, &'static str)>,
}

/// The library that tests use instead of every vendor's.
fn stand_in() -> Result<Option<Library>> {
    let Some(path) = std::env::var_os(TEST_LIBRARY) else {
        return Ok(None);
    };
    warn!(path = %Path::new(&path).display(), "a library of tests stands for the driver of the \
    vendor");
    open(&path, MODE).map(Some).map_err(|error| {
        let wrong = Error::new(ErrorKind::Config, "the library of tests cannot be opened");
        wrong.with("variable", TEST_LIBRARY).with("error", error)
    })
}

/// A vendor's library: the one already loaded (by torch), or else the first that can be loaded.
/// `Unsupported` with the vendor's name if there is none.
pub(super) fn find(vendor: &'static str, places: &Places) -> Result<Library> {
    if let Some(library) = stand_in()? {
        return Ok(library);
    }
    let process = Library::this();
    if places
        .known_by
        .is_some_and(|name| function(&process, name).is_some())
    {
        return Ok(process);
    }
    let loaded = places
        .names
        .iter()
        .map(|name| open(*name, MODE | libc::RTLD_NOLOAD));
    let below = places
        .below
        .and_then(|(variable, path)| Some(Path::new(&std::env::var_os(variable)?).join(path)));
    let below = below.iter().flat_map(|directory| {
        let paths = places.names.iter().map(move |name| directory.join(name));
        paths.map(|path| open(path, MODE))
    });
    let by_loader = places.names.iter().map(|name| open(*name, MODE));
    loaded
        .chain(below)
        .chain(by_loader)
        .find_map(std::result::Result::ok)
        .ok_or_else(|| {
            let none = "the runtime of this device is not installed, or not on the loader's path";
            let none = Error::new(ErrorKind::Unsupported, none).with("vendor", vendor);
            none.with("libraries", places.names.join(", "))
        })
}

fn open(name: impl AsFilename, mode: c_int) -> std::result::Result<Library, libloading::Error> {
    // SAFETY: the library of a vendor, as torch loads it, or one that tests built.
    unsafe { Library::open(Some(name), mode) }
}

/// A function of a library by its name.
pub(super) fn function(library: &Library, name: &str) -> Option<Function> {
    // SAFETY: looked up and not called; the caller gives it its type.
    let found = unsafe { library.get::<Option<Function>>(name.as_bytes()) };
    found.ok().and_then(|found| *found)
}

/// As [`function`]; `Unsupported` if the library does not have it.
pub(super) fn needed(library: &Library, vendor: &'static str, name: &str) -> Result<Function> {
    function(library, name).ok_or_else(|| {
        let lacks =
            "the runtime of this device lacks a function that ucm calls: it is too old, or another \
             one";
        let lacks = Error::new(ErrorKind::Unsupported, lacks).with("vendor", vendor);
        lacks.with("function", name)
    })
}

/// The first process, among this one and its ancestors, that used a vendor's library.
static BEGUN: OnceLock<Origin> = OnceLock::new();

/// The error in a child of a process that opened a device: runtimes do not survive a fork.
pub(super) const FORKED: &str =
    "this device was opened before a fork; open it in the process that uses it";

/// `Forked` if a parent of this process used a vendor's library. Checked before the first call of
/// one.
pub(super) fn check_begun() -> Result<()> {
    BEGUN.get().map_or(Ok(()), |begun| begun.check(FORKED))
}

/// Records that this process uses a vendor's library. Called after the first successful call.
pub(super) fn begun() -> Result<()> {
    let origin = Origin::this()?;
    BEGUN.get_or_init(|| origin);
    Ok(())
}

/// Error for a missing device: `Unsupported` if there is none of this kind at all.
pub(super) fn no_device(vendor: &str, ordinal: u32, count: impl Into<i64>) -> Error {
    let count = count.into();
    let kind = if count > 0 {
        ErrorKind::Config
    } else {
        ErrorKind::Unsupported
    };
    let none = Error::new(kind, "the machine has no device of this kind and number");
    none.with("device", format!("{vendor}:{ordinal}"))
        .with("devices", count)
}

/// Defines a struct with functions of a library as fields; their names share a prefix.
macro_rules! functions {
    ($(#[$attribute:meta])* $holder:ident { $($name:ident($($type:ty),*) -> $answer:ty;)* }) => {
        $(#[$attribute])*
        #[allow(non_snake_case, reason = "the vendor's names")]
        struct $holder {
            $($name: unsafe extern "C" fn($($type),*) -> $answer,)*
        }

        impl $holder {
            #[cfg(test)]
            const NAMES: &[&str] = &[$(stringify!($name)),*];

            /// Looks them all up; `Unsupported` names the first missing one.
            fn load(
                library: &libloading::os::unix::Library,
                vendor: &'static str,
                prefix: &str,
            ) -> ucm_core::Result<Self> {
                Ok(Self {
                    $($name: {
                        let name = format!("{prefix}{}", stringify!($name));
                        let found = $crate::accelerator::library::needed(library, vendor, &name)?;
                        // SAFETY: the type is that of the vendor's header or, where the table marks
                        // it as unverified, a guess.
                        unsafe {
                            std::mem::transmute::<
                                $crate::accelerator::library::Function,
                                unsafe extern "C" fn($($type),*) -> $answer,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

pub(super) use functions;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A library of these functions, which do nothing, in a directory that is removed on drop.
    pub(in super::super) fn stub(
        prefix: &str,
        names: impl Iterator<Item = &'static str>,
    ) -> (tempfile::TempDir, Library) {
        let directory = tempfile::tempdir().unwrap();
        let source: String = names
            .map(|name| format!("int {prefix}{name}(void) {{ return 0; }}\n"))
            .collect();
        let (text, built) = (
            directory.path().join("stub.c"),
            directory.path().join("libstub.so"),
        );
        std::fs::write(&text, source).unwrap();
        let mut compiler = std::process::Command::new("cc");
        let compiled = compiler
            .args(["-shared", "-fPIC", "-o"])
            .args([&built, &text]);
        assert!(compiled.status().unwrap().success());
        let library = open(&built, MODE).unwrap();
        (directory, library)
    }

    #[test]
    fn a_library_is_found_in_the_process_below_a_directory_or_not_at_all() {
        let place = |known_by, names, below| Places {
            known_by: Some(known_by),
            names,
            below,
        };
        let here = find("abacus", &place("malloc", &["libabacus.so"], None)).unwrap();
        assert!(function(&here, "free").is_some());
        let (directory, _library) = stub("abacus", ["Count"].into_iter());
        let path: &'static str = Box::leak(directory.path().to_str().unwrap().into());
        let below = find(
            "abacus",
            &place("abacusAdd", &["libstub.so"], Some(("PATH", path))),
        )
        .unwrap();
        assert!(function(&below, "abacusCount").is_some());
        let none = find(
            "abacus",
            &place("abacusAdd", &["libabacus.so", "libabacus.so.2"], None),
        );
        let none = none.err().unwrap();
        assert_eq!(none.kind(), ErrorKind::Unsupported);
        let text = none.to_string();
        assert!(
            text.contains("vendor=abacus") && text.contains("libabacus.so, libabacus.so.2"),
            "{text}"
        );
    }
}
