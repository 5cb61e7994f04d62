//! A normalised tar: each path once, parents first, names sorted, only what differs in pax.
//!
//! It is written for mkfs.erofs, which reads a pax time as whole seconds plus nanoseconds, so a
//! time before 1970 is rounded down first; and as an OCI layer, where such times do not occur.

use crate::refusal::{Outcome, Refusal};
use crate::tar::{padding, Kind, Time, BLOCK_BYTES};
use std::io::Write;

pub struct Entry<'a> {
    pub path: &'a [u8],
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub mtime: Time,
    pub link: &'a [u8],
    pub major: u32,
    pub minor: u32,
}

pub(crate) fn record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn octal(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    // What does not fit stands in a pax record.
    let value = if value < 1 << (3 * digits) { value } else { 0 };
    field[..digits].copy_from_slice(format!("{value:0digits$o}").as_bytes());
}

fn fits(value: u64, digits: u32) -> bool {
    value < 1 << (3 * digits)
}

fn block(entry: &Entry, kind: u8, name: &[u8], size: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0u8; BLOCK_BYTES];
    let name = &name[..name.len().min(100)];
    block[..name.len()].copy_from_slice(name);
    octal(&mut block[100..108], u64::from(entry.mode));
    octal(&mut block[108..116], u64::from(entry.uid));
    octal(&mut block[116..124], u64::from(entry.gid));
    octal(&mut block[124..136], size);
    octal(&mut block[136..148], u64::try_from(entry.mtime.seconds).unwrap_or(0));
    block[156] = kind;
    if entry.link.len() <= 100 {
        block[157..157 + entry.link.len()].copy_from_slice(entry.link);
    }
    block[257..265].copy_from_slice(b"ustar\x0000");
    octal(&mut block[329..337], u64::from(entry.major));
    octal(&mut block[337..345], u64::from(entry.minor));
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    octal(&mut block[148..155], sum);
    block
}

fn byte_of(kind: Kind) -> u8 {
    match kind {
        Kind::File => b'0',
        Kind::HardLink => b'1',
        Kind::Symlink => b'2',
        Kind::Char => b'3',
        Kind::Block => b'4',
        Kind::Folder => b'5',
        Kind::Fifo => b'6',
    }
}

/// The header or headers; the caller writes the content and `padding` behind it.
pub fn header(entry: &Entry) -> Vec<u8> {
    let mut records = Vec::new();
    let path = if entry.path.is_empty() { b"." } else { entry.path };
    if path.len() > 100 {
        record(&mut records, "path", path);
    }
    if entry.link.len() > 100 {
        record(&mut records, "linkpath", entry.link);
    }
    if !fits(u64::from(entry.uid), 7) {
        record(&mut records, "uid", entry.uid.to_string().as_bytes());
    }
    if !fits(u64::from(entry.gid), 7) {
        record(&mut records, "gid", entry.gid.to_string().as_bytes());
    }
    if !fits(entry.size, 11) {
        record(&mut records, "size", entry.size.to_string().as_bytes());
    }
    let Time { seconds, nanos } = entry.mtime;
    if nanos != 0 || seconds < 0 || !fits(seconds as u64, 11) {
        record(&mut records, "mtime", format!("{seconds}.{nanos:09}").as_bytes());
    }
    let mut bytes = Vec::with_capacity(3 * BLOCK_BYTES);
    if !records.is_empty() {
        let plain = Entry { path: b"", link: b"", ..*entry };
        bytes.extend_from_slice(&block(&plain, b'x', b"pax", records.len() as u64));
        bytes.extend_from_slice(&records);
        bytes.resize(bytes.len() + padding(records.len() as u64) as usize, 0);
    }
    bytes.extend_from_slice(&block(entry, byte_of(entry.kind), path, entry.size));
    bytes
}

pub fn pad(out: &mut impl Write, size: u64) -> std::io::Result<()> {
    out.write_all(&[0u8; BLOCK_BYTES][..padding(size) as usize])
}

/// Two empty blocks.
pub fn end(out: &mut impl Write) -> std::io::Result<()> {
    out.write_all(&[0u8; 2 * BLOCK_BYTES])
}

pub fn write_all(out: &mut impl Write, bytes: &[u8], what: &str) -> Outcome<()> {
    out.write_all(bytes).map_err(|error| Refusal::of_write(&error, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::test_limits;
    use crate::source::Stream;
    use crate::tar::Reader;

    #[test]
    fn what_is_written_reads_back() {
        let path = [b"d/".repeat(40), vec![b'n'; 120]].concat();
        let link = vec![b'l'; 300];
        let entry = Entry {
            path: &path,
            kind: Kind::Symlink,
            mode: 0o777,
            uid: 3_000_000_000,
            gid: 5,
            size: 0,
            mtime: Time { seconds: 1_700_000_000, nanos: 7 },
            link: &link,
            major: 0,
            minor: 0,
        };
        let bytes = header(&entry);
        let limits = test_limits();
        let found = Reader::new(Stream::new(&bytes[..]), &limits).next(0).unwrap().unwrap();
        assert_eq!(found.name, path);
        assert_eq!(found.link, link);
        assert_eq!(found.uid, 3_000_000_000);
        assert_eq!(found.mtime, entry.mtime);
    }

    #[test]
    fn record_lengths_count_themselves() {
        for length in [1usize, 2, 80, 91, 92, 93, 94, 985, 990, 995] {
            let mut bytes = Vec::new();
            record(&mut bytes, "path", &vec![b'x'; length]);
            let said: usize =
                std::str::from_utf8(&bytes).unwrap().split(' ').next().unwrap().parse().unwrap();
            assert_eq!(said, bytes.len());
        }
    }
}
