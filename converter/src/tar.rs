//! A strict reader of tar: ustar, pax, GNU long names and base-256 numbers. No sparse files.
//!
//! It reads as Go's `archive/tar` does where readers differ, since the tools that made the world's
//! layers were tested against that: only regular files have content, whatever their size field says.

use crate::limits::Limits;
use crate::numbers::{bad_number, bad_size, check_sum, device_part, field_owner, field_time, numeric};
use crate::pax::{self, Records};
use crate::planted;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::source::Source;

pub const BLOCK_BYTES: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Folder,
    Fifo,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    pub seconds: i64,
    pub nanos: u32,
}

#[derive(Clone, Debug)]
pub struct Header {
    /// As the archive has it: not yet a path.
    pub name: Vec<u8>,
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub mtime: Time,
    pub link: Vec<u8>,
    pub major: u32,
    pub minor: u32,
    pub xattrs: Vec<Vec<u8>>,
    pub opaque: bool,
    /// Where the content begins in the archive.
    pub offset: u64,
}

/// Zero bytes behind content of `size` bytes.
pub fn padding(size: u64) -> u64 {
    (BLOCK_BYTES as u64 - size % BLOCK_BYTES as u64) % BLOCK_BYTES as u64
}

type Block = [u8; BLOCK_BYTES];

pub struct Reader<'a, S: Source> {
    source: S,
    limits: &'a Limits,
    position: u64,
    /// Content of the current entry that was not read, and its padding.
    content_left: u64,
    padding_left: u64,
    pub entries: u64,
    ended: bool,
}

/// Headers that come before the one they speak of.
#[derive(Default)]
struct Before {
    pax: Option<Records>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl Before {
    fn is_empty(&self) -> bool {
        self.pax.is_none() && self.long_name.is_none() && self.long_link.is_none()
    }
}

impl<'a, S: Source> Reader<'a, S> {
    pub fn new(source: S, limits: &'a Limits) -> Self {
        Reader { source, limits, position: 0, content_left: 0, padding_left: 0, entries: 0, ended: false }
    }

    /// The next entry; its content may be read before the next call. `entries_before` are those
    /// that earlier archives of the same job had.
    pub fn next(&mut self, entries_before: u64) -> Outcome<Option<Header>> {
        self.skip(self.content_left)?;
        self.skip_padding()?;
        (self.content_left, self.padding_left) = (0, 0);
        let mut before = Before::default();
        loop {
            let Some(block) = self.block()? else {
                if before.is_empty() || planted::off("truncation") {
                    return Ok(None);
                }
                return refuse(Code::BadArchive, "ends after an extended header");
            };
            if block.iter().all(|&byte| byte == 0) {
                self.check_end(&before)?;
                return Ok(None);
            }
            check_sum(&block)?;
            match block[156] {
                b'x' => once(&mut before.pax, pax::local(&self.extended(&block)?)?)?,
                b'L' => once(&mut before.long_name, until_nul(self.extended(&block)?))?,
                b'K' => once(&mut before.long_link, until_nul(self.extended(&block)?))?,
                b'g' => {
                    self.count(entries_before)?;
                    pax::global(&self.extended(&block)?)?;
                }
                _ => {
                    self.count(entries_before)?;
                    return self.entry(&block, before).map(Some);
                }
            }
        }
    }

    /// Reads content of the current entry; 0 at its end.
    pub fn read(&mut self, buffer: &mut [u8]) -> Outcome<usize> {
        let want = buffer.len().min(usize::try_from(self.content_left).unwrap_or(usize::MAX));
        let got = self.source.read_full(&mut buffer[..want]).map_err(|e| Refusal::of_read(&e, "archive"))?;
        if got < want {
            return truncated();
        }
        self.content_left -= got as u64;
        self.position += got as u64;
        Ok(got)
    }

    /// Everything behind the end of the archive: read, so that it is hashed and counted, and ignored.
    pub fn drain(&mut self) -> Outcome<()> {
        loop {
            let there = self.source.fill().map_err(|e| Refusal::of_read(&e, "archive"))?.len();
            if there == 0 {
                return Ok(());
            }
            self.source.consume(there);
            self.position += there as u64;
        }
    }

    pub fn position(&self) -> u64 {
        self.position
    }

    fn count(&mut self, before: u64) -> Outcome<()> {
        self.entries += 1;
        self.limits.check_entries(before + self.entries)
    }

    fn skip(&mut self, count: u64) -> Outcome<()> {
        if !self.source.skip(count).map_err(|e| Refusal::of_read(&e, "archive"))?
            && !planted::off("content_end")
        {
            return truncated();
        }
        self.position += count;
        Ok(())
    }

    /// The padding behind the last content may be missing: `umoci insert` writes no end at all.
    fn skip_padding(&mut self) -> Outcome<()> {
        let mut rest = [0u8; BLOCK_BYTES];
        let want = &mut rest[..self.padding_left as usize];
        let got = self.source.read_full(want).map_err(|e| Refusal::of_read(&e, "archive"))?;
        self.position += got as u64;
        self.ended |= got < want.len();
        Ok(())
    }

    fn block(&mut self) -> Outcome<Option<Block>> {
        if self.ended {
            return Ok(None);
        }
        let mut block = [0u8; BLOCK_BYTES];
        let got = self.source.read_full(&mut block).map_err(|e| Refusal::of_read(&e, "archive"))?;
        self.position += got as u64;
        match got {
            0 => Ok(None),
            BLOCK_BYTES => Ok(Some(block)),
            _ if planted::off("truncation") => Ok(None),
            _ => truncated(),
        }
    }

    fn check_end(&mut self, before: &Before) -> Outcome<()> {
        if !before.is_empty() && !planted::off("truncation") {
            return refuse(Code::BadArchive, "ends after an extended header");
        }
        if let Some(block) = self.block()? {
            if block.iter().any(|&byte| byte != 0) && !planted::off("end_marker") {
                return refuse(Code::BadArchive, "half of an end marker");
            }
        }
        self.ended = true;
        Ok(())
    }

    /// The content of a pax or GNU header, in memory.
    fn extended(&mut self, block: &Block) -> Outcome<Vec<u8>> {
        let size = numeric(&block[124..136]).ok_or_else(bad_size)?;
        if size > self.limits.header_bytes && !planted::off("header_bytes") {
            return refuse(
                Code::BadArchive,
                format!("an extended header of more than {} bytes", self.limits.header_bytes),
            );
        }
        let mut data = vec![0u8; size as usize];
        self.content_left = size;
        self.read(&mut data)?;
        self.skip(padding(size))?;
        Ok(data)
    }

    fn entry(&mut self, block: &Block, before: Before) -> Outcome<Header> {
        let name = name_of(block, &before)?;
        let header = self.header(block, before, &name).map_err(|refusal| refusal.at(&name))?;
        self.content_left = header.size;
        self.padding_left = padding(header.size);
        Ok(Header { name, ..header })
    }

    fn header(&self, block: &Block, before: Before, name: &[u8]) -> Outcome<Header> {
        let kind = kind_of(block[156], name)?;
        let pax = before.pax.unwrap_or_default();
        let said = numeric(&block[124..136]).ok_or_else(bad_size)?;
        let size = if kind == Kind::File || planted::off("header_only") {
            pax.size.filter(|_| !planted::off("pax_size")).unwrap_or(said)
        } else {
            0
        };
        if size > self.limits.raw_bytes && !planted::off("size") {
            return refuse(Code::TooLarge, format!("a file of more than {} bytes", self.limits.raw_bytes));
        }
        let link = match (pax.link, before.long_link) {
            (Some(_), Some(_)) => return refuse(Code::BadArchive, "a link target given twice"),
            (Some(link), None) | (None, Some(link)) => link,
            (None, None) => until_nul(block[157..257].to_vec()),
        };
        let device = matches!(kind, Kind::Char | Kind::Block);
        Ok(Header {
            name: Vec::new(),
            kind,
            mode: numeric(&block[100..108]).ok_or_else(bad_number)? as u32
                & if planted::off("mode_bits") { 0o777 } else { 0o7777 },
            uid: pax.uid.map_or_else(|| field_owner(&block[108..116]), Ok)?,
            gid: pax.gid.map_or_else(|| field_owner(&block[116..124]), Ok)?,
            size,
            mtime: pax.mtime.map_or_else(|| field_time(&block[136..148]), Ok)?,
            link,
            major: if device { device_part(&block[329..337], 0xfff)? } else { 0 },
            minor: if device { device_part(&block[337..345], 0xf_ffff)? } else { 0 },
            xattrs: pax.xattrs,
            opaque: pax.opaque,
            offset: self.position,
        })
    }
}

fn truncated<T>() -> Outcome<T> {
    refuse(Code::BadArchive, "ends in the middle of an entry")
}

fn once<T>(slot: &mut Option<T>, value: T) -> Outcome<()> {
    if slot.replace(value).is_some() && !planted::off("header_chain") {
        return refuse(Code::BadArchive, "two extended headers of a kind before one entry");
    }
    Ok(())
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|&byte| byte == 0) {
        bytes.truncate(end);
    }
    bytes
}

fn name_of(block: &Block, before: &Before) -> Outcome<Vec<u8>> {
    let pax = before.pax.as_ref().and_then(|records| records.path.clone());
    match (pax, before.long_name.clone().filter(|_| !planted::off("long_names"))) {
        (Some(name), Some(_)) if planted::off("named_twice") => Ok(name),
        (Some(_), Some(_)) => refuse(Code::BadArchive, "a name given twice"),
        (Some(name), None) | (None, Some(name)) => Ok(name),
        (None, None) => {
            let name = until_nul(block[..100].to_vec());
            // GNU's own format has other things where ustar has the prefix.
            if &block[257..263] != b"ustar\0" || block[345] == 0 {
                return Ok(name);
            }
            let prefix = until_nul(block[345..500].to_vec());
            Ok([&prefix[..], b"/", &name[..]].concat())
        }
    }
}

fn kind_of(byte: u8, name: &[u8]) -> Outcome<Kind> {
    Ok(match byte {
        0 if name.ends_with(b"/") => Kind::Folder,
        0 | b'0' | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::Char,
        b'4' => Kind::Block,
        b'5' => Kind::Folder,
        b'6' => Kind::Fifo,
        _ if planted::off("types") => Kind::File,
        b'S' => return refuse(Code::UnsupportedType, "a sparse file"),
        other => {
            let shown = crate::refusal::escaped(&[other]);
            return refuse(Code::UnsupportedType, format!("an entry of type `{shown}`"));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::test_limits;
    use crate::source::Stream;

    pub fn block(name: &[u8], kind: u8, size: &[u8]) -> Block {
        let mut block = [0u8; BLOCK_BYTES];
        block[..name.len()].copy_from_slice(name);
        block[100..107].copy_from_slice(b"0000644");
        block[124..124 + size.len()].copy_from_slice(size);
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn read(bytes: &[u8]) -> Outcome<Vec<Header>> {
        let limits = test_limits();
        let mut reader = Reader::new(Stream::new(bytes), &limits);
        let mut found = Vec::new();
        while let Some(header) = reader.next(0)? {
            found.push(header);
        }
        Ok(found)
    }

    #[test]
    fn entries_and_their_end() {
        let mut bytes = block(b"a", b'0', b"3").to_vec();
        bytes.extend_from_slice(b"abc");
        bytes.resize(1024, 0);
        bytes.extend_from_slice(&block(b"b/", 0, b"0"));
        let found = read(&bytes).unwrap();
        assert_eq!(found[0].size, 3);
        assert_eq!(found[0].offset, 512);
        assert_eq!(found[1].kind, Kind::Folder);
        bytes.extend_from_slice(&[0; 512]);
        assert_eq!(read(&bytes).unwrap().len(), 2);
        bytes.extend_from_slice(&block(b"c", b'0', b"0"));
        assert_eq!(read(&bytes).unwrap_err().code, Code::BadArchive);
    }

    #[test]
    fn truncation() {
        let whole = block(b"a", b'0', b"1000");
        assert_eq!(read(&whole).unwrap_err().code, Code::BadArchive);
        assert_eq!(read(&whole[..100]).unwrap_err().code, Code::BadArchive);
        let mut no_padding = block(b"a", b'0', b"3").to_vec();
        no_padding.extend_from_slice(b"abc");
        assert_eq!(read(&no_padding).unwrap().len(), 1);
        assert_eq!(read(&no_padding[..514]).unwrap_err().code, Code::BadArchive);
        let mut long = block(b"././@LongLink", b'L', b"3").to_vec();
        long.extend_from_slice(&[b'n'; 512]);
        assert_eq!(read(&long).unwrap_err().code, Code::BadArchive);
    }

    #[test]
    fn checksum_and_long_names() {
        let mut wrong = block(b"a", b'0', b"0");
        wrong[0] = b'b';
        assert_eq!(read(&wrong).unwrap_err().code, Code::BadArchive);
        let mut bytes = block(b"././@LongLink", b'L', b"310").to_vec(); // 200
        bytes.extend_from_slice(&[b'n'; 200]);
        bytes.resize(1024, 0);
        bytes.extend_from_slice(&block(b"short", b'0', b"0"));
        assert_eq!(read(&bytes).unwrap()[0].name, vec![b'n'; 200]);
    }

    #[test]
    fn only_files_have_content() {
        let mut bytes = block(b"d", b'5', b"1000").to_vec();
        bytes.extend_from_slice(&block(b"e", b'1', b"1000"));
        assert_eq!(read(&bytes).unwrap().len(), 2);
    }
}
