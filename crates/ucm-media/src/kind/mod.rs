//! One kind of tier: its names, its options and its constructor.

mod options;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use ucm_core::{Error, ErrorKind, Result};
use ucm_infra::Clock;
use ucm_io::{IoEngine, IoOptions, IoPool, PsyncEngine};

use crate::backend::Backend;
use crate::place::Place;
use crate::scope::Scope;
use crate::spread::Spread;
use crate::values::{ValueRecords, Values};

pub use options::{Addresses, Age, Amount, CodecName, Directories, Heat, Heats, Mode, Size};

/// The options of a kind: a struct with `#[serde(default, deny_unknown_fields)]` whose fields are
/// the keys of the configuration. Keys that must be given stand in `"required"` of its schema.
pub trait TierOptions: Default + Serialize + DeserializeOwned + JsonSchema + 'static {}

impl<T: Default + Serialize + DeserializeOwned + JsonSchema + 'static> TierOptions for T {}

/// Facts that hold for every tier of a store.
#[derive(Clone)]
pub struct BuildContext {
    /// Whose records the store keeps. [`Scope::shorter`] is set for each tier.
    pub scope: Scope,
    /// Staging slots: as many writes may be under way.
    pub slots: usize,
    /// Processes of this host that will each have such a store.
    pub processes: u32,
    /// Whether the scheduler side may run on another host.
    pub scheduler_elsewhere: bool,
    /// The clock of every deadline.
    pub clock: Arc<dyn Clock>,
}

impl BuildContext {
    /// Threads on which a medium is called, `threads` of them for loads. A block that has a slot
    /// has a place in their queue too, so that an accepted dump is never refused later.
    pub fn pool(&self, name: &'static str, threads: usize, direct: bool) -> Result<Arc<IoPool>> {
        self.pool_over(PsyncEngine::new(direct), name, threads)
    }

    /// Whose records a tier keeps. `shorter`: it has a codec.
    pub fn scope(&self, shorter: bool) -> Scope {
        Scope {
            shorter,
            ..self.scope.clone()
        }
    }

    /// The medium that keeps the records of this tier in these values, over these threads.
    /// `shorter`: it has a codec.
    pub fn records(
        &self,
        values: Box<dyn Values>,
        pool: &Arc<IoPool>,
        shorter: bool,
    ) -> Arc<dyn Backend> {
        let (pool, clock) = (Arc::clone(pool), Arc::clone(&self.clock));
        Arc::new(ValueRecords::new(values, self.scope(shorter), pool, clock))
    }

    /// The same over another engine of I/O.
    pub fn pool_over(
        &self,
        engine: Arc<dyn IoEngine>,
        name: &'static str,
        threads: usize,
    ) -> Result<Arc<IoPool>> {
        let mut options = IoOptions {
            name,
            clock: Arc::clone(&self.clock),
            ..IoOptions::with_workers(threads)
        };
        for lane in &mut options.lanes {
            lane.capacity = lane.capacity.max(self.slots.min(ucm_infra::MAX_QUEUE));
        }
        IoPool::new(engine, &options)
    }
}

/// A medium that was made, and the threads on which it is called.
pub struct BuiltTier {
    /// The medium.
    pub backend: Arc<dyn Backend>,
    /// Its threads.
    pub pool: Arc<IoPool>,
    /// True if its options say that records are compressed; the medium then takes records of any
    /// length up to the layout's.
    pub compressed: bool,
    /// This many threads stuck in operations switch it off.
    pub max_stuck: usize,
}

/// Media side by side, over which records are spread.
pub struct BuiltLevel {
    /// The media, at least one.
    pub tiers: Vec<BuiltTier>,
    /// How records are spread over them.
    pub spread: Arc<Spread>,
}

impl From<BuiltTier> for Vec<BuiltLevel> {
    fn from(tier: BuiltTier) -> Self {
        let (tiers, spread) = (vec![tier], Arc::new(Spread::alone()));
        vec![BuiltLevel { tiers, spread }]
    }
}

/// A name under which a kind is configured.
#[derive(Debug, Clone, Serialize)]
pub struct StoreName {
    /// The word of a backend and of a pipeline's stage, in lower case.
    pub word: &'static str,
    /// The store class.
    pub class: &'static str,
    /// One line for the documentation.
    pub summary: &'static str,
    /// Options that are always this under this name, whatever is configured; of a layer those of
    /// the tier below it that says nothing else.
    pub fixed: Map<String, Value>,
}

impl StoreName {
    /// A name that fixes nothing.
    pub fn new(word: &'static str, class: &'static str, summary: &'static str) -> Self {
        Self {
            word,
            class,
            summary,
            fixed: Map::new(),
        }
    }

    /// The same where this option is always that.
    #[must_use]
    pub fn fixing(mut self, option: &str, value: impl Into<Value>) -> Self {
        self.fixed.insert(option.to_owned(), value.into());
        self
    }
}

type MakeMedium =
    dyn Fn(&BuildContext, Map<String, Value>) -> Result<Vec<BuiltLevel>> + Send + Sync;

type Sample = fn(&Path) -> Value;

type OpenPlace = dyn Fn(Map<String, Value>) -> Result<Box<dyn Place>> + Send + Sync;

/// A kind of tier: its names, its options and what makes it. Serialized it is what Python gets.
#[derive(Serialize)]
pub struct TierKind {
    names: Vec<StoreName>,
    role: Role,
    memory: bool,
    /// What to use instead of one that is declared only.
    instead: Option<&'static str>,
    /// The JSON schema of the options.
    options: Value,
    /// The default of every option, in the order in which they are declared.
    defaults: Box<RawValue>,
    #[serde(skip)]
    make: Option<Box<MakeMedium>>,
    #[serde(skip)]
    sample: Option<Sample>,
    #[serde(skip)]
    place: Option<Box<OpenPlace>>,
}

/// What it is.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Role {
    Medium,
    /// A word that keeps nothing and stands for options of the tier below it.
    Layer,
    /// A store class written in Python, without an engine of the core.
    Python,
    /// It is not built yet.
    Declared,
}

/// The options of what has none.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct NoOptions {}

impl TierKind {
    /// A kind that keeps records: on one medium, on several side by side ([`BuiltLevel`]), or in
    /// several levels, top first.
    pub fn medium<O: TierOptions, T: Into<Vec<BuiltLevel>> + 'static>(
        name: StoreName,
        make: fn(&BuildContext, O) -> Result<T>,
    ) -> Self {
        let word = name.word;
        let make =
            move |context: &BuildContext, given| Ok(make(context, read(word, given)?)?.into());
        Self {
            make: Some(Box::new(make)),
            ..Self::new::<O>(name, Role::Medium)
        }
    }

    /// A word that is no tier: written before one, it stands for what is fixed under its name, as
    /// far as the options of that tier say nothing else.
    pub fn layer(name: StoreName) -> Self {
        Self::new::<NoOptions>(name, Role::Layer)
    }

    /// A kind that is a store class of Python.
    pub fn python<O: TierOptions>(name: StoreName) -> Self {
        Self::new::<O>(name, Role::Python)
    }

    /// A kind that can be configured and is then refused; `instead` says what to use.
    pub fn declared<O: TierOptions>(name: StoreName, instead: &'static str) -> Self {
        Self {
            instead: Some(instead),
            ..Self::new::<O>(name, Role::Declared)
        }
    }

    fn new<O: TierOptions>(name: StoreName, role: Role) -> Self {
        let mut schemas = SchemaSettings::draft2020_12();
        schemas.inline_subschemas = true;
        let options = schemas.into_generator().into_root_schema_for::<O>();
        Self {
            names: vec![name],
            role,
            memory: false,
            instead: None,
            make: None,
            sample: None,
            place: None,
            options: options.to_value(),
            // Serde refuses no struct of plain fields.
            defaults: to_raw_value(&O::default()).unwrap_or_default(),
        }
    }

    /// It is memory of this host: faster than what lies in files, shared by the processes of an
    /// engine.
    #[must_use]
    pub fn in_memory(mut self) -> Self {
        self.memory = true;
        self
    }

    /// What a test configures: a small tier of its own for each scratch directory. The behaviour
    /// suite runs over every medium that says so.
    #[must_use]
    pub fn tested_with(mut self, sample: fn(&Path) -> Value) -> Self {
        self.sample = Some(sample);
        self
    }

    /// What tools see of it, where that is no directory.
    #[must_use]
    pub fn seen_by_tools<O: TierOptions>(mut self, open: fn(O) -> Result<Box<dyn Place>>) -> Self {
        let word = self.word();
        self.place = Some(Box::new(move |given| open(read(word, given)?)));
        self
    }

    /// It has this further name.
    #[must_use]
    pub fn also(mut self, name: StoreName) -> Self {
        self.names.push(name);
        self
    }

    /// The word of its first name, which is what the description of a store calls it.
    pub fn word(&self) -> &'static str {
        self.names.first().map_or("", |name| name.word)
    }

    /// Its names, its own first.
    pub fn names(&self) -> &[StoreName] {
        &self.names
    }

    /// The options of a test with this scratch directory; none where the kind has none for tests.
    pub fn sample(&self, scratch: &Path) -> Option<Map<String, Value>> {
        match self.sample?(scratch) {
            Value::Object(options) => Some(options),
            _ => None,
        }
    }

    /// Whether it is a medium that the core makes.
    pub fn is_medium(&self) -> bool {
        self.make.is_some()
    }

    /// Makes the medium. `Config` for an option that does not exist or is wrong, `Unsupported` for
    /// a kind that the core has no medium of.
    pub fn build(
        &self,
        context: &BuildContext,
        options: Map<String, Value>,
    ) -> Result<Vec<BuiltLevel>> {
        if let Some(make) = &self.make {
            return make(context, options);
        }
        Err(match self.role {
            Role::Medium | Role::Layer => {
                self.unsupported("it keeps nothing; give what it stands for to the tier below it")
            }
            Role::Python => self.unsupported("it is a store of Python and no tier of the core"),
            Role::Declared => {
                let instead = self.instead.unwrap_or_default();
                self.unsupported(&format!("it is not built yet; {instead}"))
            }
        })
    }

    /// What tools see of it. `Unsupported` for a kind that shows them nothing.
    pub fn place(&self, options: Map<String, Value>) -> Result<Box<dyn Place>> {
        match &self.place {
            Some(open) => open(options),
            None => Err(self.unsupported("tools look into directories of it, or not at all")),
        }
    }

    fn unsupported(&self, text: &str) -> Error {
        Error::new(ErrorKind::Unsupported, text.to_owned()).with("kind", self.word())
    }
}

/// Reads the options of a kind.
fn read<O: DeserializeOwned>(word: &'static str, given: Map<String, Value>) -> Result<O> {
    serde_json::from_value(Value::Object(given)).map_err(|error| {
        let text = "the options of a tier are not what they should be";
        Error::new(ErrorKind::Config, text)
            .with("kind", word)
            .caused_by(error)
    })
}

/// A time that is given in seconds. `Config` for one that is none.
pub fn seconds(key: &'static str, value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|error| {
        Error::new(ErrorKind::Config, format!("{key}: {error}")).with("value", value)
    })
}
