//! What the host asks, as it stands in OPEN, TELL and bind.

use crate::failure::{Failure, Outcome};
use cloche_protocol::limits::JSON_DEPTH_MAX;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::Deserialize as Derive;
use std::collections::BTreeMap;
use std::fmt;

/// Text that may carry bytes outside UTF-8, as lone surrogates U+DC80..U+DCFF.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text(pub Vec<u8>);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Text;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string without NUL")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Text, E> {
                let text = unescape(bytes).ok_or_else(|| E::custom("not a text"))?;
                Ok(Text(text))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
                self.visit_bytes(text.as_bytes())
            }
        }
        // Asked for bytes, serde_json gives lone surrogates as three bytes each instead of an error.
        deserializer.deserialize_bytes(Bytes)
    }
}

/// `ED B2..B3 xx` is how a lone surrogate U+DC80..U+DCFF arrives; a NUL or any other wrong byte is refused.
fn unescape(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(chunk) = rest.utf8_chunks().next() {
        out.extend_from_slice(chunk.valid().as_bytes());
        rest = &rest[chunk.valid().len()..];
        if rest.is_empty() {
            break;
        }
        let (surrogate, behind) = rest.split_first_chunk::<3>()?;
        let unit = match *surrogate {
            [0xed, middle @ 0xb2..=0xb3, last @ 0x80..=0xbf] => {
                (u32::from(middle) & 0x3f) << 6 | u32::from(last) & 0x3f
            }
            _ => return None,
        };
        // unit is 0xc80..=0xcff for U+DC80..U+DCFF.
        out.push(u8::try_from(unit.checked_sub(0xc00)?).ok().filter(|byte| *byte >= 0x80)?);
        rest = behind;
    }
    (!out.contains(&0)).then_some(out)
}

#[derive(Derive)]
pub struct Head {
    pub op: String,
    pub command: Option<String>,
    pub stderr_stream: Option<u32>,
}

#[derive(Derive, Default)]
pub struct Tmp {
    #[serde(default)]
    pub noexec: bool,
    pub size_bytes: Option<u64>,
}

#[derive(Derive, Default, Clone, Copy)]
pub struct Limits {
    pub processes: Option<u64>,
    pub open_files: Option<u64>,
}

#[derive(Derive)]
pub struct Bind {
    pub hostname: Option<String>,
    pub machine_id: Option<String>,
    pub entropy: Option<String>,
    pub time_ns: Option<u64>,
    pub env: Option<BTreeMap<Text, Text>>,
    pub tmp: Option<Tmp>,
    #[serde(default)]
    pub root_read_only: bool,
    /// Paths that stay writable under `root_read_only`, besides /workspace, /tmp and /dev/shm.
    pub writable: Option<Vec<Text>>,
    pub limits: Option<Limits>,
    pub user: Option<String>,
    /// Absent: the sandbox has no way out, and nothing listens for one.
    pub egress: Option<Egress>,
}

#[derive(Derive)]
pub struct Egress {
    pub proxy_port: u16,
}

#[derive(Derive)]
pub struct Trust {
    pub name: String,
}

/// END of a stream that the guest opened.
#[derive(Derive)]
pub struct End {
    pub ok: Option<EndOk>,
}

#[derive(Derive)]
pub struct EndOk {
    #[serde(default)]
    pub ports: Vec<u16>,
}

#[derive(Derive)]
pub struct Pty {
    #[serde(default)]
    pub rows: u16,
    #[serde(default)]
    pub cols: u16,
    pub term: Option<Text>,
}

#[derive(Derive)]
pub struct Exec {
    pub command: String,
    pub argv: Vec<Text>,
    pub env: Option<BTreeMap<Text, Text>>,
    pub cwd: Option<Text>,
    pub user: Option<String>,
    #[serde(default)]
    pub stdin: bool,
    pub pty: Option<Pty>,
    pub privileges: Option<String>,
    pub umask: Option<u32>,
    /// Which proxy address the command's env names.
    pub proxy_slot: Option<u8>,
}

#[derive(Derive)]
pub struct Tell {
    pub signal: Option<i32>,
    pub group: Option<bool>,
    pub resize: Option<Pty>,
}

#[derive(Derive)]
pub struct Port {
    pub port: u16,
    pub host: Option<String>,
}

/// Reads `json` as a T, after the contract's own rules: an object, not nested deeper than 16.
pub fn parse<'a, T: Derive<'a>>(json: &'a [u8]) -> Outcome<T> {
    check_depth(json)?;
    serde_json::from_slice(json).map_err(|error| Failure::invalid(error.to_string()))
}

pub fn check_depth(json: &[u8]) -> Outcome<()> {
    let first = json.iter().find(|byte| !byte.is_ascii_whitespace());
    if first != Some(&b'{') {
        return Err(Failure::invalid("not a JSON object"));
    }
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > JSON_DEPTH_MAX {
            return Err(Failure::invalid("JSON nested too deeply"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(json: &str) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::from_str::<Text>(json).map(|text| text.0)
    }

    #[test]
    fn lone_surrogates_are_bytes() {
        assert_eq!(text(r#""a\udcffb\udc80""#).expect("bytes"), b"a\xffb\x80");
        assert_eq!(text("\"h\u{e9}\u{1f600}\"").expect("text"), "h\u{e9}\u{1f600}".as_bytes());
        assert_eq!(text(r#""\ud83d\ude00""#).expect("a pair is a character"), "\u{1f600}".as_bytes());
        for bad in [r#""\udc7f""#, r#""\ud800""#, r#""\udd00""#, r#""a\u0000b""#, "1"] {
            assert!(text(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_carry_bytes_too() {
        let map: BTreeMap<Text, Text> = serde_json::from_str(r#"{"K\udcfe":"v"}"#).expect("a map");
        assert_eq!(map.keys().next().expect("a key").0, b"K\xfe");
        let head: Head = parse(br#"{"op":"exec","argv":["\udcff"],"command":"c"}"#).expect("ignored fields");
        assert_eq!(head.op, "exec");
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |n: usize| format!("{{\"a\":{}{}}}", "[".repeat(n), "]".repeat(n));
        assert!(check_depth(nested(15).as_bytes()).is_ok());
        assert!(check_depth(nested(16).as_bytes()).is_err());
        assert!(check_depth(br#"{"a":"[[[[[[[[[[[[[[[[[[[\"{{{"}"#).is_ok());
        assert!(check_depth(b"[]").is_err());
    }
}
