//! Where things lie below the prefix in a bucket.
//!
//! ```text
//! <prefix>/ucm-root.json             this prefix belongs to ucm: format, UUID, capacity
//! <prefix>/ucm-space.json            who may write how much: changed by compare-and-swap
//! <prefix>/uses/<16 hex>.json        which segments one writer has used, and when
//! <prefix>/<namespace>/
//!     manifest-<part>.json           the identity in words, and the sizes of that part
//!     segments/<16 hex>-<16 hex>-<16 hex>.seg
//!                                    many records: when it was sealed, writer, sequence
//! ```
//! A segment's name begins with its time (ns of Unix time, by its writer's clock), so that a
//! listing can begin where the last one ended. Only names of exactly these patterns are read or
//! removed.

use object_store::path::Path;
use ucm_core::Part;

use crate::blobs::BlobName;
use crate::layout::{MARKER, SegmentName, is_namespace, parse_hex};

/// The document of the space.
const SPACE: &str = "ucm-space.json";

/// Names in one bucket.
#[derive(Debug)]
pub(super) struct Names {
    prefix: Path,
    namespace: String,
}

impl Names {
    pub(super) fn new(prefix: &str, namespace: String) -> Self {
        let prefix = Path::from(prefix);
        Self { prefix, namespace }
    }

    pub(super) fn prefix(&self) -> &Path {
        &self.prefix
    }

    fn below(&self, parts: &[&str]) -> Path {
        let all = parts.iter();
        all.fold(self.prefix.clone(), |path, part| path.join(*part))
    }

    pub(super) fn marker(&self) -> Path {
        self.below(&[MARKER])
    }

    pub(super) fn space(&self) -> Path {
        self.below(&[SPACE])
    }

    /// A name by which this writer reads the server's clock.
    pub(super) fn clock(&self, writer: u64) -> Path {
        self.below(&["uses", &format!("{writer:016x}.probe")])
    }

    /// A name that was never used, to try what a server does.
    pub(super) fn probe(&self) -> Path {
        self.below(&["uses", &format!("{}.probe", crate::random_hex())])
    }

    pub(super) fn all_uses(&self) -> Path {
        self.below(&["uses"])
    }

    pub(super) fn uses(&self, writer: u64) -> Path {
        self.below(&["uses", &format!("{writer:016x}.json")])
    }

    pub(super) fn manifest(&self, part: Part) -> Path {
        self.below(&[&self.namespace, &format!("manifest-{part}.json")])
    }

    /// Where the segments of the namespace lie.
    pub(super) fn segments(&self) -> Path {
        self.below(&[&self.namespace, "segments"])
    }

    pub(super) fn segment(&self, segment: BlobName) -> Path {
        self.segments().join(segment.file_name())
    }

    /// A name before that of every segment sealed at this time or later.
    pub(super) fn segments_from(&self, sealed_ns: u64) -> Path {
        self.segments().join(format!("{sealed_ns:016x}"))
    }

    /// Where one of our objects would lie below a root; empty for other objects.
    pub(super) fn path_in_a_root(&self, path: &Path) -> String {
        let below = path.prefix_match(&self.prefix).into_iter().flatten();
        let below: Vec<String> = below.map(|part| part.as_ref().to_owned()).collect();
        if let Some(segment) = self.parse_segment(path) {
            return format!("{}/segments/{}", below[0], segment.name.file_name());
        }
        match &below.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            [MARKER] => MARKER.to_owned(),
            [SPACE] => format!("space/{SPACE}"),
            ["uses", name] => format!("space/{name}"),
            [namespace, name] if is_namespace(namespace.as_ref()) && is_manifest(name) => {
                format!("{namespace}/{name}")
            }
            _ => String::new(),
        }
    }

    /// The segment that has this path, of whatever namespace.
    pub(super) fn parse_segment(&self, path: &Path) -> Option<BlobName> {
        let mut below = path.prefix_match(&self.prefix)?;
        let (namespace, segments, name) = (below.next()?, below.next()?, below.next()?);
        let ours = is_namespace(namespace.as_ref().as_ref())
            && segments.as_ref() == "segments"
            && below.next().is_none();
        ours.then(|| BlobName::parse(name.as_ref())).flatten()
    }
}

impl BlobName {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (time, rest) = name.split_once('-')?;
        Some(Self {
            sealed_ns: parse_hex(time)?,
            name: SegmentName::parse(rest.as_ref())?,
        })
    }

    pub(super) fn file_name(self) -> String {
        format!("{:016x}-{}", self.sealed_ns, self.name.file_name())
    }
}

fn is_manifest(name: &str) -> bool {
    let part = name.strip_prefix("manifest-");
    let part = part.and_then(|rest| rest.strip_suffix(".json"));
    part.is_some_and(|part| part.parse::<Part>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_exact_and_in_order_of_time() {
        let names = Names::new("/a/b/", "c".repeat(32));
        let segment = |sealed_ns| BlobName {
            sealed_ns,
            name: SegmentName {
                writer: 7,
                sequence: 9,
            },
        };
        let path = names.segment(segment(0xabc));
        assert_eq!(
            path.as_ref(),
            format!(
                "a/b/{}/segments/0000000000000abc-0000000000000007-0000000000000009.seg",
                "c".repeat(32)
            )
        );
        assert_eq!(names.parse_segment(&path), Some(segment(0xabc)));
        assert!(names.segments_from(0xabc) < path && path < names.segments_from(0xabd));
        for other in [
            format!("a/{}/segments/{}", "c".repeat(32), segment(1).file_name()),
            format!("a/b/{}/segments/{}", "C".repeat(32), segment(1).file_name()),
            format!("a/b/{}/blocks/{}", "c".repeat(32), segment(1).file_name()),
            format!(
                "a/b/{}/segments/x/{}",
                "c".repeat(32),
                segment(1).file_name()
            ),
            format!(
                "a/b/{}/segments/{}",
                "c".repeat(32),
                segment(1).name.file_name()
            ),
            format!(
                "a/b/{}/segments/{}x",
                "c".repeat(32),
                segment(1).file_name()
            ),
        ] {
            assert_eq!(
                names.parse_segment(&Path::from(other.as_str())),
                None,
                "{other}"
            );
        }
        assert_eq!(
            Names::new("", "n".to_owned()).marker().as_ref(),
            "ucm-root.json"
        );
    }
}
