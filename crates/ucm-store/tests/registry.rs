//! Every medium of the registry, and one that another crate adds, through the description that
//! Python sends.

#![allow(clippy::unwrap_used, reason = "tests may fail")]

mod common;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use ucm_infra::SystemClock;
use ucm_media::registry::{self, BuildContext, BuiltLevel, StoreName, TierKind};
use ucm_store::builder;
use ucm_store::engine::{Engine, Until};
use ucm_testkit::{ToyMap, ToyValues};

use common::{
    Device, Fixture, Medium, directory, eventually, id, identity, ids, is_here, kinds, media,
    sample, shape,
};

/// An engine over these stages, with blocks as most tests have them.
fn open(stages: &Value) -> ucm_core::Result<Engine> {
    open_on("host", stages)
}

/// The same on a device of this name.
fn open_on(device: &str, stages: &Value) -> ucm_core::Result<Engine> {
    let sizes = Fixture::default();
    let block = shape(&sizes).0.raw_len();
    let described = json!({
        "stages": stages, "device": device, "identity": identity("w").json(), "part": [0, 0, 0], "tensor_sizes": sizes.tensors,
        "shard_size": block, "block_size": block, "block_tokens": 16, "dtype": "f32", "labels": {}, "processes": 1,
        "scheduler_elsewhere": false, "lookup_only": false, "staging_bytes": 1 << 20, "copy_threads": 1,
        "lookup_s": 20.0, "load_s": 30.0, "dump_s": 30.0, "probe_s": 30.0, "shutdown_s": 3.0,
        "breaker_threshold": 4, "breaker_window_s": 60.0, "breaker_cool_down_s": 10.0,
        "breaker_damaged_per_minute": 16,
    });
    let fixture = builder::StoreSpec::parse(&described.to_string())?;
    fixture.open(SystemClock::shared())
}

/// Dumps two blocks, looks them up and loads them.
fn check(engine: &Engine) {
    let fixture = Fixture::default();
    // A dump waits for its first grant, which follows the first count.
    eventually("it was counted", || engine.stats()["storage_counted"] == 1);
    let source = Device::filled(&fixture, &ids(2));
    let dumped = engine.dump(source.rows(&ids(2))).unwrap();
    assert!(dumped.wait(engine.clock(), Until::Published, None));
    assert!(dumped.failures().is_empty(), "{:?}", dumped.failures());
    assert_eq!(
        engine.lookup(&[id(0), id(1), id(2)]).unwrap(),
        [true, true, false]
    );
    let target = Device::blank(&fixture, &ids(2));
    let loaded = engine.load(target.rows(&ids(2)), None).unwrap();
    assert!(loaded.wait(engine.clock(), Until::Published, None));
    assert!(loaded.failures().is_empty());
    assert!(ids(2).into_iter().all(|block| target.is_right(block)));
}

#[test]
fn every_medium_of_the_registry_makes_a_store() {
    let media = kinds().into_iter().filter(|kind| is_here(kind));
    for kind in media.filter(|kind| kind.word() != "other") {
        let dir = directory();
        let mut stage = sample(&kind, dir.path());
        stage.insert("kind".into(), kind.word().into());
        check(&open(&json!([stage])).unwrap());
    }
}

#[test]
fn the_toy_does_what_every_medium_of_its_shape_does() {
    let map = Arc::new(ToyMap::default());
    ucm_testkit::check_values(&|| Ok(Box::new(ToyValues::new(1000, Arc::clone(&map)))));
}

#[test]
fn the_toy_is_a_column_of_the_suite() {
    assert!(media().contains(&Medium::Kind("toy")));
    let wrong = open(&json!([{"kind": "toy", "toy_record": 3}]))
        .err()
        .unwrap();
    assert!(
        wrong.to_string().contains("not what they should be"),
        "{wrong}"
    );
}

/// Options of a kind that another crate adds: a toy under another name.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct OtherOptions {
    /// how many it takes
    other_records: u32,
}

fn make(context: &BuildContext, options: OtherOptions) -> ucm_core::Result<Vec<BuiltLevel>> {
    let toy = json!({"toy_records": options.other_records});
    registry::find("toy")?.build(context, toy.as_object().cloned().unwrap_or_default())
}

#[test]
fn a_device_that_is_not_built_is_refused_with_those_that_are() {
    let error = open_on("abacus", &json!([{"kind": "toy"}])).err().unwrap();
    assert_eq!(error.kind(), ucm_core::ErrorKind::Config);
    let text = error.to_string();
    assert!(
        text.contains("device=abacus") && text.contains("known=host, simu, cpu, cuda"),
        "{text}"
    );
}

#[test]
fn another_crate_adds_a_kind() {
    assert!(
        kinds().iter().any(|kind| kind.word() == "toy"),
        "before the other"
    );
    let name = StoreName::new("other", "UcmOtherStore", "of another crate");
    registry::register(TierKind::medium(name.clone(), make)).unwrap();
    let again = registry::register(TierKind::medium(name, make));
    assert!(again.is_err(), "its name is taken");
    check(&open(&json!([{"kind": "other", "other_records": 5}])).unwrap());
    let kinds: Vec<Value> = serde_json::from_str(&registry::describe()).unwrap();
    let last = kinds.last().unwrap();
    assert_eq!(
        last["options"]["properties"]["other_records"]["description"],
        "how many it takes"
    );
}
