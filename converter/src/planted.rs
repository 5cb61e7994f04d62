//! Switches a defence off, so that a test can show that its absence is noticed.
//!
//! Only the binary that the tests build with the feature `planted` listens; in the shipped one
//! `off` is the constant `false`.

#[cfg(feature = "planted")]
pub fn off(defence: &str) -> bool {
    use std::sync::OnceLock;
    static NAMED: OnceLock<String> = OnceLock::new();
    NAMED.get_or_init(|| std::env::var("CLOCHE_CONVERT_PLANTED").unwrap_or_default()) == defence
}

#[cfg(not(feature = "planted"))]
#[inline(always)]
pub fn off(_defence: &str) -> bool {
    false
}

/// With the defence `unpack` off (`open`: and the filter on), entries are also written to the host's file system, as a naive
/// unpacker would do it.
#[cfg(feature = "planted")]
pub fn unpack(header: &crate::tar::Header) {
    use crate::tar::Kind;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;
    if !off("unpack") && !off("open") {
        return;
    }
    let (name, link) =
        (Path::new(OsStr::from_bytes(&header.name)), Path::new(OsStr::from_bytes(&header.link)));
    let result = match header.kind {
        Kind::Folder => std::fs::create_dir(name),
        Kind::Symlink => std::os::unix::fs::symlink(link, name),
        Kind::HardLink => std::fs::hard_link(link, name),
        _ => std::fs::write(name, b"unpacked"),
    };
    if let Err(error) = result {
        eprintln!("planted: {}: {error}", name.display());
    }
}

#[cfg(not(feature = "planted"))]
#[inline(always)]
pub fn unpack(_header: &crate::tar::Header) {}
