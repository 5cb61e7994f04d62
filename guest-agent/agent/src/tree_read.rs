//! `tree.read`, inside a worker: a folder (or one file) as a tar stream.

use crate::failure::{During, Failure, Outcome};
use crate::json::Object;
use crate::tar::{padding, write_end, write_header, Header, Kind, BLOCK_BYTES};
use crate::wire::Text;
use crate::worker::Channel;
use serde::Deserialize;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

const ERRORS_MAX: usize = 1_000;
const BUFFER_BYTES: usize = 262_144;

/// Per-file failures: the rest of the tree goes on.
#[derive(Default)]
pub struct Errors {
    list: Vec<String>,
    more: u64,
}

impl Errors {
    pub fn add(&mut self, path: &[u8], failure: &Failure) {
        if self.list.len() >= ERRORS_MAX {
            self.more += 1;
            return;
        }
        let entry =
            Object::new().text("path", path).text("code", failure.code).text("message", &failure.message);
        self.list.push(entry.finish());
    }

    pub fn end(&self, files: u64) -> String {
        let list = format!("[{}]", self.list.join(","));
        let mut end = Object::new().number("files", files).raw("errors", &list);
        if self.more > 0 {
            end = end.number("errors_more", self.more);
        }
        end.finish()
    }
}

#[derive(Deserialize)]
pub struct Ask {
    path: Text,
    exclude: Option<Vec<Text>>,
}

struct Walk<'a, W: Write> {
    out: W,
    exclude: &'a [Text],
    errors: Errors,
    files: u64,
    buffer: Vec<u8>,
}

pub fn read(ask: &Ask, channel: &mut Channel) -> Outcome<String> {
    let root = ask.path.path()?;
    let about = fs::metadata(&root).during(|| root.display().to_string())?;
    let mut walk = Walk {
        out: BufWriter::with_capacity(BUFFER_BYTES, &*channel.output),
        exclude: ask.exclude.as_deref().unwrap_or(&[]),
        errors: Errors::default(),
        files: 0,
        buffer: vec![0; BUFFER_BYTES],
    };
    if about.is_dir() {
        // The root itself must be readable; below it, what cannot be read is an entry of `errors`.
        fs::read_dir(&root).during(|| root.display().to_string())?;
        walk.folder(&root, b"")?;
    } else {
        let name = root.file_name().map_or(&b"file"[..], |name| name.as_bytes()).to_vec();
        walk.entry(&root, &name, &about)?;
    }
    write_end(&mut walk.out)?;
    walk.out.flush()?;
    Ok(walk.errors.end(walk.files))
}

impl<W: Write> Walk<'_, W> {
    fn folder(&mut self, folder: &Path, prefix: &[u8]) -> Outcome<()> {
        let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let mut entries = match entries {
            Ok(entries) => entries,
            Err(error) => {
                self.errors.add(prefix, &error.into());
                return Ok(());
            }
        };
        entries.sort_by_key(fs::DirEntry::file_name);
        for found in entries {
            let name = [prefix, found.file_name().as_bytes()].concat();
            if self.exclude.iter().any(|pattern| is_excluded(&pattern.0, &name)) {
                continue;
            }
            match found.metadata() {
                Ok(about) => self.entry(&found.path(), &name, &about)?,
                Err(error) => self.errors.add(&name, &error.into()),
            }
        }
        Ok(())
    }

    /// Fails only when the stream itself does.
    fn entry(&mut self, path: &Path, name: &[u8], about: &Metadata) -> Outcome<()> {
        let kind = about.file_type();
        let mut header = Header {
            name: name.to_vec(),
            kind: Kind::File,
            mode: about.mode() & 0o7777,
            uid: about.uid(),
            gid: about.gid(),
            size: 0,
            mtime: about.mtime(),
            link: Vec::new(),
        };
        if kind.is_dir() {
            header.kind = Kind::Folder;
            header.name.push(b'/');
            write_header(&mut self.out, &header)?;
            self.files += 1;
            return self.folder(path, &header.name);
        }
        if kind.is_file() {
            return self.file(path, header);
        }
        if kind.is_symlink() {
            header.kind = Kind::Symlink;
            match fs::read_link(path) {
                Ok(target) => header.link = target.as_os_str().as_bytes().to_vec(),
                Err(error) => {
                    self.errors.add(name, &error.into());
                    return Ok(());
                }
            }
        } else if kind.is_fifo() {
            header.kind = Kind::Fifo;
        } else {
            self.errors.add(name, &Failure::new("unsupported", "a socket or device"));
            return Ok(());
        }
        write_header(&mut self.out, &header)?;
        self.files += 1;
        Ok(())
    }

    fn file(&mut self, path: &Path, mut header: Header) -> Outcome<()> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let opened = File::options().read(true).custom_flags(flags).open(path);
        let file = match opened.and_then(|file| Ok((file.metadata()?.len(), file))) {
            Ok((size, file)) => {
                header.size = size;
                file
            }
            Err(error) => {
                self.errors.add(&header.name, &error.into());
                return Ok(());
            }
        };
        write_header(&mut self.out, &header)?;
        self.files += 1;
        let sent = self.content(file, header.size)?;
        if sent < header.size {
            self.errors.add(&header.name, &Failure::new("io", "it became shorter while it was read"));
            io::copy(&mut io::repeat(0).take(header.size - sent), &mut self.out)?;
        }
        self.out.write_all(&[0; BLOCK_BYTES][..padding(header.size)])?;
        Ok(())
    }

    /// At most `size` bytes: the header has promised them, and a file may grow meanwhile.
    fn content(&mut self, file: File, size: u64) -> Outcome<u64> {
        let mut file = file.take(size);
        let mut sent = 0;
        // A read that fails half-way counts as a file that became shorter.
        while let Ok(count @ 1..) = file.read(&mut self.buffer) {
            self.out.write_all(&self.buffer[..count])?;
            sent += count as u64;
        }
        Ok(sent)
    }
}

/// A pattern matches the whole relative path or, without a slash, any last name; `*` and `?` as in a shell.
fn is_excluded(pattern: &[u8], name: &[u8]) -> bool {
    let pattern = pattern.strip_suffix(b"/").unwrap_or(pattern);
    let last = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    matches(pattern, name) || (!pattern.contains(&b'/') && matches(pattern, last))
}

fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes() {
        for (pattern, name, yes) in [
            ("*.pyc", "a/b/c.pyc", true),
            ("node_modules", "a/node_modules", true),
            ("node_modules/", "node_modules", true),
            ("a/b", "a/b", true),
            ("a/b", "c/a/b", false),
            ("?", "ab", false),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "axxbyy", false),
        ] {
            assert_eq!(is_excluded(pattern.as_bytes(), name.as_bytes()), yes, "{pattern} {name}");
        }
    }
}
