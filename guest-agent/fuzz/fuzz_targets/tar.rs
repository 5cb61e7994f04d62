#![no_main]
//! A hostile archive's headers.

use cloche_guest::tar::{padding, read_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    while let Ok(Some(header)) = read_header(&mut rest) {
        let skip = header.size.saturating_add(padding(header.size) as u64);
        rest = &rest[usize::try_from(skip).unwrap_or(usize::MAX).min(rest.len())..];
    }
});
