//! The golden vectors, built here and rendered to JSON by hand so that the bytes of the files are fixed.

use cloche_protocol::{encode, limits::*, Kind};
use std::fmt::Write;

pub struct Part {
    pub bytes: Vec<u8>,
    pub repeat: usize,
}

pub struct Expected {
    pub kind: Kind,
    pub stream: u32,
    pub payload: Vec<Part>,
}

pub struct Vector {
    pub name: &'static str,
    pub note: &'static str,
    pub parts: Vec<Part>,
    pub frames: Vec<Expected>,
    pub error: Option<&'static str>,
}

pub fn folder() -> std::path::PathBuf {
    // Where this checkout is, not the one that the cached test was compiled in.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("run by cargo");
    std::path::Path::new(&here).join("../../protocol/guest/vectors")
}

pub fn join(parts: &[Part]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.bytes.repeat(part.repeat)).collect()
}

fn once(bytes: Vec<u8>) -> Vec<Part> {
    vec![Part { bytes, repeat: 1 }]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes all");
        text
    })
}

fn parts_json(parts: &[Part], key: &str) -> String {
    if let [Part { bytes, repeat: 1 }] = parts {
        return format!("\"{key}hex\": \"{}\"", hex(bytes));
    }
    let list: Vec<String> = parts
        .iter()
        .map(|part| format!("{{\"hex\": \"{}\", \"repeat\": {}}}", hex(&part.bytes), part.repeat))
        .collect();
    format!("\"{key}parts\": [{}]", list.join(", "))
}

impl Vector {
    pub fn render(&self) -> String {
        let frames: Vec<String> = self
            .frames
            .iter()
            .map(|frame| {
                format!(
                    "\n    {{\"kind\": \"{}\", \"stream\": {}, {}}}",
                    frame.kind.name(),
                    frame.stream,
                    parts_json(&frame.payload, "payload_")
                )
            })
            .collect();
        format!(
            "{{\n  \"name\": \"{}\",\n  \"note\": \"{}\",\n  {},\n  \"frames\": [{}{}],\n  \"error\": {}\n}}\n",
            self.name,
            self.note,
            parts_json(&self.parts, ""),
            frames.join(","),
            if frames.is_empty() { "" } else { "\n  " },
            self.error.map_or("null".into(), |error| format!("\"{error}\"")),
        )
    }
}

fn nonce() -> Vec<u8> {
    (0xa0..0xb0).collect()
}

fn pair(a: u64, b: u64) -> Vec<u8> {
    [a.to_le_bytes(), b.to_le_bytes()].concat()
}

/// One good frame of every kind, with a payload as the contract has it.
fn samples() -> Vec<(Kind, u32, Vec<u8>)> {
    let with_nonce = |json: &str| [nonce(), json.as_bytes().to_vec()].concat();
    vec![
        (
            Kind::Hello,
            0,
            br#"{"gen": 1, "agent": "0.1.0", "arch": "x86_64", "boot": "00112233445566778899aabbccddeeff", "ops": ["exec"]}"#.to_vec(),
        ),
        (Kind::Open, 2, br#"{"op": "exec", "command": "c1", "argv": ["true"]}"#.to_vec()),
        (Kind::Opened, 2, br#"{"pid": 7}"#.to_vec()),
        (Kind::Data, 2, b"hello\n\0\x0d\xff".to_vec()),
        (Kind::Credit, 2, pair(9, 65_545)),
        (Kind::Eof, 4, 1_000_000_000_000u64.to_le_bytes().to_vec()),
        (Kind::End, 2, br#"{"ok": {"code": 0}}"#.to_vec()),
        (Kind::Confirm, 2, vec![]),
        (Kind::Abort, 0xffff_fffe, br#"{"reason": "timeout"}"#.to_vec()),
        (Kind::Tell, 2, br#"{"signal": 15, "group": true}"#.to_vec()),
        (Kind::Ping, 0, b"12345678".to_vec()),
        (Kind::Pong, 0, b"12345678".to_vec()),
        (Kind::Reset, 0, nonce()),
        (
            Kind::State,
            0,
            with_nonce(r#"{"streams": {"2": {"op": "exec", "command": "c1", "opened": true, "sent": 9, "acked": 0, "received": 0, "eof_sent": false, "eof_received": false, "ended": false}}, "highest_host": 2, "highest_guest": 0}"#),
        ),
        (Kind::Resume, 0, with_nonce(r#"{"streams": {"2": {"logged": 9}}, "close": []}"#)),
    ]
}

fn frame(kind: Kind, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(kind, stream, payload, &mut bytes);
    bytes
}

fn expected(kind: Kind, stream: u32, payload: &[u8]) -> Expected {
    Expected { kind, stream, payload: once(payload.to_vec()) }
}

fn zeros() -> Part {
    Part { bytes: vec![0], repeat: RESET_PADDING_BYTES }
}

const NAMES: [&str; 15] = [
    "kind-01-hello",
    "kind-02-open",
    "kind-03-opened",
    "kind-04-data",
    "kind-05-credit",
    "kind-06-eof",
    "kind-07-end",
    "kind-08-confirm",
    "kind-09-abort",
    "kind-10-tell",
    "kind-11-ping",
    "kind-12-pong",
    "kind-13-reset",
    "kind-14-state",
    "kind-15-resume",
];

pub fn all() -> Vec<Vector> {
    let mut vectors: Vec<Vector> = samples()
        .into_iter()
        .zip(NAMES)
        .map(|((kind, stream, payload), name)| Vector {
            name,
            note: "one good frame; must decode the same at every split point",
            parts: once(frame(kind, stream, &payload)),
            frames: vec![expected(kind, stream, &payload)],
            error: None,
        })
        .collect();
    vectors.extend(sequences());
    vectors.extend(damage());
    vectors
}

fn sequences() -> Vec<Vector> {
    let samples = samples();
    let back_to_back = samples.iter().flat_map(|(k, s, p)| frame(*k, *s, p)).collect();
    let data = frame(Kind::Data, 2, b"abc");
    let largest = vec![Part { bytes: vec![0x5a], repeat: PAYLOAD_BYTES_MAX }];
    let whole = frame(Kind::Data, 2, &join(&largest));
    let (head, rest) = whole.split_at(HEADER_BYTES);
    vec![
        Vector {
            name: "back-to-back",
            note: "all kinds in one read; must decode the same at every split point",
            parts: once(back_to_back),
            frames: samples.iter().map(|(k, s, p)| expected(*k, *s, p)).collect(),
            error: None,
        },
        Vector {
            name: "padding",
            note: "zero bytes before, between and after frames are skipped",
            parts: once([&[0; 5][..], &data, &[0; 3], &data, &[0; 20]].concat()),
            frames: vec![expected(Kind::Data, 2, b"abc"), expected(Kind::Data, 2, b"abc")],
            error: None,
        },
        Vector {
            name: "half-frame",
            note: "a frame that has not ended: neither a frame nor an error",
            parts: once([&data[..], &data[..data.len() - 1]].concat()),
            frames: vec![expected(Kind::Data, 2, b"abc")],
            error: None,
        },
        Vector {
            name: "largest-frame",
            note: "length = 131072",
            parts: vec![
                Part { bytes: head.to_vec(), repeat: 1 },
                Part { bytes: vec![0x5a], repeat: PAYLOAD_BYTES_MAX },
                Part { bytes: rest[PAYLOAD_BYTES_MAX..].to_vec(), repeat: 1 },
            ],
            frames: vec![Expected { kind: Kind::Data, stream: 2, payload: largest }],
            error: None,
        },
        Vector {
            name: "reset-between-frames",
            note: "zeros and RESET when the decoder stood between frames: no error",
            parts: vec![
                Part { bytes: data.clone(), repeat: 1 },
                zeros(),
                Part { bytes: frame(Kind::Reset, 0, &nonce()), repeat: 1 },
            ],
            frames: vec![expected(Kind::Data, 2, b"abc"), expected(Kind::Reset, 0, &nonce())],
            error: None,
        },
    ]
}

/// Damage, then what a re-attach sends, then a frame that must be decoded again.
fn damaged(
    name: &'static str,
    note: &'static str,
    error: &'static str,
    bad: Vec<u8>,
    padded: bool,
) -> Vector {
    let good = frame(Kind::Data, 2, b"before");
    let lost = frame(Kind::Data, 2, b"lost");
    let reset = frame(Kind::Reset, 0, &nonce());
    let after = frame(Kind::Ping, 0, b"after");
    let mut parts = vec![Part { bytes: [good, bad].concat(), repeat: 1 }];
    if padded {
        parts.push(zeros());
    } else {
        parts.push(Part { bytes: lost, repeat: 1 });
    }
    parts.push(Part { bytes: [reset, after].concat(), repeat: 1 });
    Vector {
        name,
        note,
        parts,
        frames: vec![
            expected(Kind::Data, 2, b"before"),
            expected(Kind::Reset, 0, &nonce()),
            expected(Kind::Ping, 0, b"after"),
        ],
        error: Some(error),
    }
}

fn damage() -> Vec<Vector> {
    let data = frame(Kind::Data, 2, b"payload");
    let mut bad_crc = data.clone();
    *bad_crc.last_mut().expect("a frame has bytes") ^= 1;
    let cut = data[..data.len() - 6].to_vec();
    let cut_header = data[..3].to_vec();
    let long_cut = frame(Kind::Data, 2, &[7; 200])[..60].to_vec();
    let mut long = vec![Kind::Data as u8, 2, 0, 0, 0];
    long.extend_from_slice(&(PAYLOAD_BYTES_MAX as u32 + 1).to_le_bytes());
    let mut longest = vec![Kind::Data as u8, 2, 0, 0, 0];
    longest.extend_from_slice(&u32::MAX.to_le_bytes());
    let unknown = frame_of_byte(16);
    let unknown_255 = frame_of_byte(255);
    let mut fake = frame(Kind::Reset, 0, &nonce());
    fake[12] ^= 0x40;
    let fake = [bad_crc.clone(), fake].concat();
    let swallow = {
        let mut bytes = vec![Kind::Data as u8, 2, 0, 0, 0];
        bytes.extend_from_slice(&40u32.to_le_bytes());
        bytes
    };
    let mut vectors = vec![
        damaged("bad-crc", "a frame after the bad one is dropped too", "crc", bad_crc.clone(), false),
        damaged("bad-crc-zeros-reset", "bad checksum, then zeros and RESET", "crc", bad_crc, true),
        damaged("cut-in-payload-zeros-reset", "half a frame, completed by zeros", "crc", cut, true),
        damaged("cut-in-header-zeros-reset", "half a header, completed by zeros", "crc", cut_header, true),
        damaged("cut-long-zeros-reset", "half of a longer frame, completed by zeros", "crc", long_cut, true),
        damaged("length-over", "length = 131073", "length", long, true),
        damaged("length-huge", "length = 2^32 - 1", "length", longest, false),
        damaged("kind-unknown", "kind 16, otherwise a good frame", "kind", unknown, false),
        damaged("kind-255", "kind 255, otherwise a good frame", "kind", unknown_255, true),
        damaged(
            "fake-reset-in-scan",
            "while scanning, a RESET with a bad checksum is dropped",
            "crc",
            fake,
            true,
        ),
    ];
    vectors.push(damaged(
        "length-swallows-reset",
        "a lying length covers RESET: the bad frame's own bytes are searched, from its second byte on",
        "crc",
        swallow,
        false,
    ));
    vectors
}

fn frame_of_byte(kind: u8) -> Vec<u8> {
    let mut bytes = vec![kind, 2, 0, 0, 0, 1, 0, 0, 0, b'x'];
    let crc = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}
