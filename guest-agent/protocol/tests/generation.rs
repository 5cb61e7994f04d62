//! The constants are those of `gen-1.json`.

use cloche_protocol::{limits::*, Kind};
use serde_json::Value;

#[test]
fn constants_match_the_contract() {
    // Where this checkout is, not the one that the cached test was compiled in.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("run by cargo");
    let path = format!("{here}/../../protocol/guest/gen-1.json");
    let text = std::fs::read_to_string(path).expect("gen-1.json");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let number = |key: &str| file[key].as_u64().expect(key);
    assert_eq!(number("generation"), u64::from(GENERATION));
    assert_eq!(file["frame"]["payload_bytes_max"], PAYLOAD_BYTES_MAX);
    assert_eq!(number("nonce_bytes"), NONCE_BYTES as u64);
    assert_eq!(number("reset_padding_bytes"), RESET_PADDING_BYTES as u64);
    assert_eq!(RESET_PADDING_BYTES, FRAME_BYTES_MAX);
    assert_eq!(number("window_bytes_start"), WINDOW_BYTES_START);
    assert_eq!(number("window_bytes_max"), WINDOW_BYTES_MAX);
    assert_eq!(number("windows_bytes_per_sandbox_max"), WINDOWS_BYTES_PER_SANDBOX_MAX);
    assert_eq!(number("streams_per_opener_max"), STREAMS_PER_OPENER_MAX as u64);
    assert_eq!(number("ping_bytes_max"), PING_BYTES_MAX as u64);
    assert_eq!(number("json_depth_max"), JSON_DEPTH_MAX as u64);
    assert_eq!(number("drain_after_exit_ms"), DRAIN_AFTER_EXIT_MS);
    assert_eq!(number("agent_uid"), u64::from(AGENT_UID));
    assert_eq!(file["ops"], Value::from(OPS.to_vec()));
    let kinds = file["kinds"].as_object().expect("kinds");
    assert_eq!(kinds.len(), Kind::ALL.len());
    for kind in Kind::ALL {
        assert_eq!(kinds[kind.name()], kind as u8);
        assert_eq!(Kind::from_byte(kind as u8), Some(kind));
    }
    let names: Vec<&str> = PACKAGE_INSTALL_CAPABILITIES.iter().map(|number| capability(*number)).collect();
    let mut wanted: Vec<&str> = file["package_install_capabilities"]
        .as_array()
        .expect("list")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    wanted.sort_by_key(|name| names.iter().position(|n| n == name));
    assert_eq!(names, wanted);
}

fn capability(number: u32) -> &'static str {
    match number {
        0 => "CHOWN",
        1 => "DAC_OVERRIDE",
        3 => "FOWNER",
        4 => "FSETID",
        6 => "SETGID",
        7 => "SETUID",
        31 => "SETFCAP",
        _ => "?",
    }
}
