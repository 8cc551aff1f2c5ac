//! The keys of S3: of the file that a store names, of the environment, or of the files that AWS's
//! own tools keep. Keys go from here to the client and nowhere else.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use object_store::aws::AmazonS3Builder;
use ucm_core::{Error, ErrorKind, Result};

use crate::secret_file;

/// Where a variable of the environment is looked up.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;
/// The function that reads a file, if there is one.
type ReadFile<'a> = &'a dyn Fn(PathBuf) -> Result<Option<String>>;

/// Variables that say by themselves who we are, so that no file is read.
const SAID: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];

/// A client's beginnings with keys and region of the profile that `AWS_PROFILE` names, or
/// `default`: from this file if one is given, else from the environment and, as far as that does
/// not say them, `~/.aws/credentials` and `~/.aws/config`. `Config` where the file that is given
/// has none.
pub(super) fn of_s3(file: Option<&Path>) -> Result<AmazonS3Builder> {
    let environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (found, mut builder) = match file {
        None => {
            let found = Profile::read(&environment, &text_of)?;
            (found, AmazonS3Builder::from_env())
        }
        Some(path) => {
            let only = |name: &str| match name {
                "AWS_SHARED_CREDENTIALS_FILE" => path.to_str().map(str::to_owned),
                "AWS_PROFILE" => environment(name),
                _ => None,
            };
            let found = Profile::read(&only, &text_of)?;
            if found.keys.is_none() {
                let text = "this file has no keys: aws_access_key_id and aws_secret_access_key, \
                            below [default] or the name in AWS_PROFILE";
                let none = Error::new(ErrorKind::Config, text);
                return Err(none.with("object_credentials", path.display()));
            }
            (found, AmazonS3Builder::new())
        }
    };
    if let Some(region) = found.region {
        builder = builder.with_region(region);
    }
    if let Some((id, secret)) = found.keys {
        builder = builder
            .with_access_key_id(id)
            .with_secret_access_key(secret);
        if let Some(token) = found.token {
            builder = builder.with_token(token);
        }
    }
    Ok(builder)
}

/// The text of a file of AWS's tools, if there is one that can be read. `Config` where it holds
/// keys and others may read it.
fn text_of(path: PathBuf) -> Result<Option<String>> {
    let Ok(file) = File::open(&path) else {
        return Ok(None);
    };
    let Ok(bytes) = secret_file::bytes_of(&file) else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if text.contains("aws_secret_access_key") {
        secret_file::check(&file, &path, "the keys of S3")?;
    }
    Ok(Some(text))
}

/// Settings of the files that the environment does not have.
#[derive(Default)]
struct Profile {
    keys: Option<(String, String)>,
    token: Option<String>,
    region: Option<String>,
}

impl Profile {
    fn read(environment: Environment<'_>, read: ReadFile<'_>) -> Result<Self> {
        let home = environment("HOME").map(|home| PathBuf::from(home).join(".aws"));
        let file = |variable: &str, name: &str| {
            let path = environment(variable).map(PathBuf::from);
            match path.or_else(|| home.as_ref().map(|home| home.join(name))) {
                Some(path) => read(path),
                None => Ok(None),
            }
        };
        let config = file("AWS_CONFIG_FILE", "config")?;
        let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials")?;
        let name = environment("AWS_PROFILE").unwrap_or_else(|| "default".to_owned());
        let mut says = HashMap::new();
        // The file of keys counts for more than the other one, which names its sections in another
        // way.
        for (text, section) in [
            (&config, format!("profile {name}")),
            (&config, name.clone()),
            (&credentials, name.clone()),
        ] {
            says.extend(section_of(text.as_deref().unwrap_or_default(), &section));
        }
        let mut found = Self::default();
        let regions = ["AWS_REGION", "AWS_DEFAULT_REGION"];
        if regions.iter().all(|name| environment(name).is_none()) {
            found.region = says.remove("region");
        }
        if SAID.iter().all(|name| environment(name).is_none()) {
            let id = says.remove("aws_access_key_id");
            found.keys = id.zip(says.remove("aws_secret_access_key"));
            found.token = says.remove("aws_session_token");
        }
        Ok(found)
    }
}

/// The keys of one section of such a file.
fn section_of(text: &str, section: &str) -> HashMap<String, String> {
    let mut inside = false;
    let mut says = HashMap::new();
    for line in text.lines().map(str::trim) {
        let name = line.strip_prefix('[');
        if let Some(name) = name.and_then(|rest| rest.strip_suffix(']')) {
            inside = name.trim() == section;
        } else if inside
            && !line.starts_with(['#', ';'])
            && let Some((key, value)) = line.split_once('=')
        {
            says.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    says
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: &str = "[default]\naws_access_key_id = one\naws_secret_access_key = \
                        two\n[other]\naws_access_key_id=three\n\
                        aws_secret_access_key=four\naws_session_token = five\n# aws_access_key_id \
                        = six\n";
    const CONFIG: &str = "[default]\nregion = here\n[profile other]\nregion = there\n";

    fn read(environment: &[(&str, &str)]) -> Profile {
        let variable = |name: &str| {
            environment
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let file = |path: PathBuf| {
            Ok(match path.to_str() {
                Some("/home/.aws/credentials" | "/keys") => Some(KEYS.to_owned()),
                Some("/home/.aws/config") => Some(CONFIG.to_owned()),
                _ => None,
            })
        };
        Profile::read(&variable, &file).unwrap()
    }

    #[test]
    fn a_file_with_keys_that_others_may_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str, mode| {
            let path = dir.path().join("file");
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let error = text_of(file(KEYS, 0o644)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("chmod 600"), "{error}");
        assert!(!error.to_string().contains("two"), "{error}");
        assert!(of_s3(Some(&file(KEYS, 0o640))).is_err());
        assert_eq!(text_of(file(KEYS, 0o600)).unwrap().as_deref(), Some(KEYS));
        assert_eq!(
            text_of(file(CONFIG, 0o644)).unwrap().as_deref(),
            Some(CONFIG),
            "no keys in it"
        );
        assert_eq!(text_of(dir.path().join("none")).unwrap(), None);
    }

    #[test]
    fn the_profile_that_is_named_is_read() {
        let found = read(&[("HOME", "/home")]);
        assert_eq!(found.keys, Some(("one".to_owned(), "two".to_owned())));
        assert_eq!((found.region.as_deref(), found.token), (Some("here"), None));
        let found = read(&[("HOME", "/home"), ("AWS_PROFILE", "other")]);
        assert_eq!(found.keys, Some(("three".to_owned(), "four".to_owned())));
        assert_eq!(
            (found.region.as_deref(), found.token.as_deref()),
            (Some("there"), Some("five"))
        );
        let found = read(&[("AWS_SHARED_CREDENTIALS_FILE", "/keys")]);
        assert!(found.keys.is_some() && found.region.is_none());
        assert!(read(&[]).keys.is_none());
    }

    #[test]
    fn the_environment_counts_for_more() {
        for name in SAID {
            assert!(
                read(&[("HOME", "/home"), (name, "x")]).keys.is_none(),
                "{name}"
            );
        }
        assert_eq!(
            read(&[("HOME", "/home"), ("AWS_REGION", "elsewhere")]).region,
            None
        );
    }
}
