//! The golden files are what this crate produces, and decode to what they say.

mod golden;

use cloche_protocol::Decoder;
use serde_json::Value;

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex")).collect()
}

fn bytes(value: &Value, key: &str) -> Vec<u8> {
    if let Some(text) = value[format!("{key}hex")].as_str() {
        return unhex(text);
    }
    let parts = value[format!("{key}parts")].as_array().expect("hex or parts");
    parts
        .iter()
        .flat_map(|p| {
            unhex(p["hex"].as_str().expect("hex")).repeat(p["repeat"].as_u64().expect("n") as usize)
        })
        .collect()
}

type Decoded = (Vec<(String, u32, Vec<u8>)>, Option<&'static str>);

fn decode<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Decoded {
    let mut decoder = Decoder::new();
    let (mut frames, mut first) = (Vec::new(), None);
    for piece in pieces {
        decoder.push(piece);
        while let Some(next) = decoder.next() {
            match next {
                Ok(f) => frames.push((f.kind.name().to_string(), f.stream, f.payload.to_vec())),
                Err(error) => first = first.or(Some(error.name())),
            }
        }
    }
    (frames, first)
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).expect("a vector is JSON");
    let input = bytes(&value, "");
    let frames = value["frames"].as_array().expect("frames").iter();
    let want: Vec<_> = frames
        .map(|f| {
            let kind = f["kind"].as_str().expect("kind").to_string();
            (kind, f["stream"].as_u64().expect("stream") as u32, bytes(f, "payload_"))
        })
        .collect();
    let name = &value["name"];
    let error = value["error"].as_str();
    let (got, first) = decode(std::iter::once(&input[..]));
    assert!(got == want && first == error, "{name}: {got:?} {first:?}");
    let (got, first) = decode(input.chunks(4_093));
    assert!(got == want && first == error, "{name} in pieces");
    if input.len() < 4_096 {
        assert!(decode(input.chunks(1)) == (want.clone(), error), "{name} byte by byte");
        for at in 0..input.len() {
            let (a, b) = input.split_at(at);
            assert!(decode([a, b].into_iter()) == (want.clone(), error), "{name} split at {at}");
        }
    }
}

#[test]
fn files_are_current_and_decode() {
    for vector in golden::all() {
        let path = golden::folder().join(format!("{}.json", vector.name));
        let text = std::fs::read_to_string(&path).expect("run: cargo run --example vectors");
        assert_eq!(text, vector.render(), "{} is stale: cargo run --example vectors", vector.name);
        check(&text);
    }
}

#[test]
fn every_file_is_known() {
    let known: Vec<String> = golden::all().iter().map(|v| format!("{}.json", v.name)).collect();
    for entry in std::fs::read_dir(golden::folder()).expect("the folder of vectors") {
        let name = entry.expect("an entry").file_name().into_string().expect("a plain name");
        assert!(name == "README.md" || known.contains(&name), "{name} is written by nobody");
    }
}
