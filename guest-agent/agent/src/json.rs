//! Outgoing JSON, written by hand: serde_json cannot write the lone surrogates that carry
//! bytes which are not UTF-8.

use std::fmt::Write;

/// An object under construction.
pub struct Object(String);

impl Default for Object {
    fn default() -> Self {
        Self::new()
    }
}

impl Object {
    pub fn new() -> Self {
        Object(String::from("{"))
    }

    fn key(&mut self, key: &str) {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        quote(key.as_bytes(), &mut self.0);
        self.0.push(':');
    }

    /// Text or a path: bytes that are not UTF-8 become `\udcXX`.
    pub fn text(mut self, key: &str, value: impl AsRef<[u8]>) -> Self {
        self.key(key);
        quote(value.as_ref(), &mut self.0);
        self
    }

    pub fn number(mut self, key: &str, value: impl Into<i128>) -> Self {
        self.key(key);
        write!(self.0, "{}", value.into()).expect("a string takes all");
        self
    }

    pub fn flag(mut self, key: &str, value: bool) -> Self {
        self.raw_in_place(key, if value { "true" } else { "false" });
        self
    }

    /// `json` is already JSON.
    pub fn raw(mut self, key: &str, json: &str) -> Self {
        self.raw_in_place(key, json);
        self
    }

    pub fn raw_in_place(&mut self, key: &str, json: &str) {
        self.key(key);
        self.0.push_str(json);
    }

    pub fn finish(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// A JSON list of strings.
pub fn list<T: AsRef<[u8]>>(items: impl IntoIterator<Item = T>) -> String {
    let mut out = String::from("[");
    for item in items {
        if out.len() > 1 {
            out.push(',');
        }
        quote(item.as_ref(), &mut out);
    }
    out.push(']');
    out
}

pub fn quote(bytes: &[u8], out: &mut String) {
    out.push('"');
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                c if (c as u32) < 0x20 || c == '\u{7f}' => escape(c as u32, out),
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            escape(0xdc00 + u32::from(*byte), out);
        }
    }
    out.push('"');
}

fn escape(unit: u32, out: &mut String) {
    write!(out, "\\u{unit:04x}").expect("a string takes all");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_objects() {
        let text = Object::new().text("a\"", b"x\xff\n\x01y").number("n", 7u64).flag("f", true).finish();
        assert_eq!(text, r#"{"a\"":"x\udcff\n\u0001y","n":7,"f":true}"#);
        assert_eq!(list(["a", "b"]), r#"["a","b"]"#);
    }
}
