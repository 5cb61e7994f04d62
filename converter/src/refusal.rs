//! Why a job was refused: a closed list of codes, a sentence, and which entry it was.

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    BadArchive,
    BadDigest,
    BadLength,
    TooManyEntries,
    TooDeep,
    NameTooLong,
    TooLarge,
    Ratio,
    BadName,
    BadLink,
    BadSize,
    BadCompression,
    UnsupportedType,
    NoSpace,
    MkfsFailed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    pub code: Code,
    pub message: String,
    pub layer: Option<u32>,
    pub entry: Option<String>,
}

pub type Outcome<T> = Result<T, Refusal>;

impl Refusal {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into(), layer: None, entry: None }
    }

    /// Names the entry, unless one closer to the fault did so already.
    pub fn at(mut self, name: &[u8]) -> Self {
        self.entry.get_or_insert_with(|| escaped(name));
        self
    }

    pub fn in_layer(mut self, layer: u32) -> Self {
        self.layer.get_or_insert(layer);
        self
    }

    /// What a failed write on one of our descriptors means.
    pub fn of_write(error: &std::io::Error, what: &str) -> Self {
        Self::of_io(error, "write", what)
    }

    pub fn of_read(error: &std::io::Error, what: &str) -> Self {
        Self::of_io(error, "read", what)
    }

    fn of_io(error: &std::io::Error, verb: &str, what: &str) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                Refusal::new(Code::NoSpace, format!("no space left for the {what}"))
            }
            Some(libc::EFBIG) => Refusal::new(Code::TooLarge, format!("the {what} exceeds its size limit")),
            _ => Refusal::new(Code::BadArchive, format!("cannot {verb} the {what}: {error}")),
        }
    }
}

pub fn refuse<T>(code: Code, message: impl Into<String>) -> Outcome<T> {
    Err(Refusal::new(code, message))
}

const ESCAPED_BYTES_MAX: usize = 200;

/// Bytes that an archive chose, as plain ASCII of a bounded length.
pub fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes.iter().take(ESCAPED_BYTES_MAX) {
        if byte == b'\\' || !(b' '..=b'~').contains(&byte) {
            text.push_str(&format!("\\x{byte:02x}"));
        } else {
            text.push(byte as char);
        }
    }
    if bytes.len() > ESCAPED_BYTES_MAX {
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_and_bounds() {
        assert_eq!(escaped(b"a/b\n\xff\\"), "a/b\\x0a\\xff\\x5c");
        assert!(escaped(&[0u8; 5000]).len() <= 4 * ESCAPED_BYTES_MAX + 3);
    }

    #[test]
    fn codes_are_snake_case() {
        assert_eq!(serde_json::to_string(&Code::TooManyEntries).unwrap(), "\"too_many_entries\"");
    }
}
