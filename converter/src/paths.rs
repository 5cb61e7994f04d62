//! Names out of archives, made into plain paths below the root: `a/b/c`, the root is empty.
//!
//! A leading slash is dropped, as every reader of layers does. `..` is refused rather than
//! resolved: no honest archive has it. Names are bytes; UTF-8 is not required of them.

use crate::limits::Limits;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome};

pub fn normalised(name: &[u8], limits: &Limits) -> Outcome<Vec<u8>> {
    let mut path: Vec<u8> = Vec::with_capacity(name.len());
    let mut depth = 0;
    if planted::off("bytes") && std::str::from_utf8(name).is_err() {
        return normalised(String::from_utf8_lossy(name).as_bytes(), limits);
    }
    if name.contains(&0) && !planted::off("nul") {
        return refuse(Code::BadName, "a NUL byte in a name");
    }
    for part in name.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => continue,
            b".." if !planted::off("dotdot") => {
                return refuse(Code::BadName, "`..` in a name");
            }
            _ => {}
        }
        check_part(part, limits)?;
        depth += 1;
        if depth > limits.depth && !planted::off("depth") {
            return refuse(Code::TooDeep, format!("more than {} directories deep", limits.depth));
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(part);
    }
    if path.len() > limits.path_bytes && !planted::off("path_bytes") {
        return refuse(Code::NameTooLong, format!("a path of more than {} bytes", limits.path_bytes));
    }
    Ok(path)
}

pub fn check_part(part: &[u8], limits: &Limits) -> Outcome<()> {
    if part.len() > limits.name_bytes && !planted::off("name_bytes") {
        return refuse(Code::NameTooLong, format!("a name of more than {} bytes", limits.name_bytes));
    }
    Ok(())
}

/// The directory and the last name.
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::test_limits;

    fn good(name: &[u8]) -> Vec<u8> {
        normalised(name, &test_limits()).unwrap()
    }

    fn code(name: &[u8]) -> Code {
        normalised(name, &test_limits()).unwrap_err().code
    }

    #[test]
    fn plain_paths() {
        assert_eq!(good(b"./a//b/./c/"), b"a/b/c");
        assert_eq!(good(b"/etc/passwd"), b"etc/passwd");
        assert_eq!(good(b"./"), b"");
        assert_eq!(good(b"caf\xe9"), b"caf\xe9");
        assert_eq!(good(b"..."), b"...");
    }

    #[test]
    fn refused_paths() {
        assert_eq!(code(b"a/../b"), Code::BadName);
        assert_eq!(code(b"../x"), Code::BadName);
        assert_eq!(code(b"a\0b"), Code::BadName);
        assert_eq!(code(&[b'x'; 256]), Code::NameTooLong);
        assert_eq!(code(&b"d/".repeat(129)), Code::TooDeep);
        let long: Vec<u8> = [vec![b'n'; 200], b"/".to_vec()].concat().repeat(30);
        assert_eq!(code(&long), Code::NameTooLong);
    }

    #[test]
    fn splits() {
        assert_eq!(split(b"a/b/c"), (&b"a/b"[..], &b"c"[..]));
        assert_eq!(split(b"a"), (&b""[..], &b"a"[..]));
    }
}
