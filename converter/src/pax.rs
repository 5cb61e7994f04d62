//! Records of a pax header: `LENGTH KEY=VALUE\n`, strictly.

use crate::planted;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::tar::Time;

/// What a local header says about the entry behind it.
#[derive(Clone, Debug, Default)]
pub struct Records {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime: Option<Time>,
    /// Names only: the values are lost.
    pub xattrs: Vec<Vec<u8>>,
    /// overlayfs' mark, as runsc writes it.
    pub opaque: bool,
}

/// The next record and what follows it.
fn split(data: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = data.iter().take(11).position(|&byte| byte == b' ')?;
    let digits = &data[..space];
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let length: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let record = data.get(..length)?;
    let body = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|&byte| byte == b'=')?;
    if equals == 0 {
        return None;
    }
    Some((&body[..equals], &body[equals + 1..], &data[length..]))
}

fn each(mut data: &[u8], mut take: impl FnMut(&[u8], &[u8]) -> Outcome<()>) -> Outcome<()> {
    while !data.is_empty() {
        match split(data) {
            Some((key, value, rest)) => {
                take(key, value)?;
                data = rest;
            }
            None if planted::off("pax_records") => return Ok(()),
            None => return refuse(Code::BadArchive, "a malformed pax record"),
        }
    }
    Ok(())
}

pub fn local(data: &[u8]) -> Outcome<Records> {
    let mut records = Records::default();
    each(data, |key, value| {
        match key {
            // An empty value takes an earlier record back.
            b"path" => records.path = text(value)?,
            b"linkpath" => records.link = text(value)?,
            b"size" => records.size = Some(number(value)?),
            b"uid" => records.uid = Some(owner(number(value)?)?),
            b"gid" => records.gid = Some(owner(number(value)?)?),
            b"mtime" => records.mtime = Some(time(value)?),
            _ => other(key, value, &mut records)?,
        }
        Ok(())
    })?;
    Ok(records)
}

fn other(key: &[u8], value: &[u8], records: &mut Records) -> Outcome<()> {
    if key.starts_with(b"GNU.sparse.") && !planted::off("sparse") {
        return refuse(Code::UnsupportedType, "a sparse file");
    }
    for prefix in [&b"SCHILY.xattr."[..], b"LIBARCHIVE.xattr."] {
        if let Some(name) = key.strip_prefix(prefix) {
            records.opaque |= name == b"trusted.overlay.opaque" && value == b"y";
            records.xattrs.push(name.to_vec());
        }
    }
    Ok(())
}

/// A global header is read and not applied, as Docker and umoci do; where applying it would
/// make another archive of this one, readers disagree, and it is refused.
pub fn global(data: &[u8]) -> Outcome<()> {
    each(data, |key, _| {
        let matters = matches!(key, b"path" | b"linkpath" | b"size" | b"uid" | b"gid")
            || key.starts_with(b"GNU.sparse.");
        if matters && !planted::off("pax_global") {
            return refuse(Code::BadArchive, "a global pax header that renames or resizes entries");
        }
        Ok(())
    })
}

fn text(value: &[u8]) -> Outcome<Option<Vec<u8>>> {
    if value.contains(&0) && !planted::off("nul") {
        return refuse(Code::BadName, "a NUL byte in a pax name");
    }
    Ok((!value.is_empty()).then(|| value.to_vec()))
}

fn number(value: &[u8]) -> Outcome<u64> {
    let bad = || Refusal::new(Code::BadSize, "a pax number out of range");
    if planted::off("pax_number") && !value.iter().all(u8::is_ascii_digit) {
        return Ok(0);
    }
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(bad());
    }
    if planted::off("pax_number") {
        return Ok(std::str::from_utf8(value).map_err(|_| bad())?.parse().unwrap_or(0));
    }
    let number: u64 = std::str::from_utf8(value).map_err(|_| bad())?.parse().map_err(|_| bad())?;
    if number > i64::MAX as u64 {
        return Err(bad());
    }
    Ok(number)
}

/// The highest id means "no change" to chown, so it is nobody's.
pub fn owner(number: u64) -> Outcome<u32> {
    match u32::try_from(number) {
        Ok(id) if id != u32::MAX => Ok(id),
        _ if planted::off("owner") => Ok(number as u32),
        _ => refuse(Code::BadSize, "an owner above 4294967294"),
    }
}

fn time(value: &[u8]) -> Outcome<Time> {
    let bad = || Refusal::new(Code::BadArchive, "a malformed pax time");
    let text = std::str::from_utf8(value).map_err(|_| bad())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let negative = whole.starts_with('-');
    let mut seconds: i64 = whole.parse().map_err(|_| bad())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(bad());
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let mut nanos: u32 = digits.parse().map_err(|_| bad())?;
    if negative && nanos > 0 {
        seconds = seconds.checked_sub(1).ok_or_else(bad)?;
        nanos = 1_000_000_000 - nanos;
    }
    Ok(Time { seconds, nanos })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::record;

    fn one(key: &str, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        record(&mut bytes, key, value);
        bytes
    }

    #[test]
    fn records_of_a_local_header() {
        let mut data = one("path", b"ab");
        record(&mut data, "mtime", b"12.5000001");
        record(&mut data, "SCHILY.xattr.user.note", b"hello");
        let records = local(&data).unwrap();
        assert_eq!(records.path.unwrap(), b"ab");
        assert_eq!(records.mtime.unwrap(), Time { seconds: 12, nanos: 500_000_100 });
        assert_eq!(records.xattrs, vec![b"user.note".to_vec()]);
    }

    #[test]
    fn malformed_records() {
        for data in [
            &b"9 path=ab\n"[..],
            b"99 path=ab\n",
            b"10 path=ab",
            b"x path=ab\n",
            b" path=ab\n",
            b"11 path=ab\n\n\n",
            b"0 path=ab\n",
            b"99999999999999999999 path=a\n",
            b"5 =a\n",
            b"+9 path=a\n",
        ] {
            assert_eq!(local(data).unwrap_err().code, Code::BadArchive, "{}", data.escape_ascii());
        }
    }

    #[test]
    fn numbers() {
        assert_eq!(local(&one("size", b"-1")).unwrap_err().code, Code::BadSize);
        assert_eq!(local(&one("size", b"99999999999999999999")).unwrap_err().code, Code::BadSize);
        assert_eq!(local(&one("uid", b"4294967295")).unwrap_err().code, Code::BadSize);
    }

    #[test]
    fn negative_times() {
        assert_eq!(time(b"-1.5").unwrap(), Time { seconds: -2, nanos: 500_000_000 });
        assert_eq!(time(b"-3").unwrap(), Time { seconds: -3, nanos: 0 });
        assert!(time(b"1.5x").is_err());
        assert!(time(b"99999999999999999999").is_err());
    }

    #[test]
    fn nul_and_sparse() {
        assert_eq!(local(&one("path", b"a\0")).unwrap_err().code, Code::BadName);
        assert_eq!(local(&one("GNU.sparse.major", b"1")).unwrap_err().code, Code::UnsupportedType);
    }
}
