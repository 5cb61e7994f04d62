//! `file.read` and `file.write`, inside a worker.

use crate::failure::{During, Failure, Outcome};
use crate::json::Object;
use crate::wire::Text;
use crate::worker::Channel;
use serde::Deserialize;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

const CHUNK_BYTES: usize = 262_144;
const TEMPORARY_TRIES: u32 = 100;

/// The name of the file that is not whole yet, for the signal that ends this worker.
static UNFINISHED: AtomicPtr<libc::c_char> = AtomicPtr::new(ptr::null_mut());

impl Text {
    /// Absolute, or relative to `/`, which is the worker's directory.
    pub fn path(&self) -> Outcome<PathBuf> {
        if self.0.is_empty() {
            return Err(Failure::invalid("an empty path"));
        }
        Ok(Path::new("/").join(OsStr::from_bytes(&self.0)))
    }
}

#[derive(Deserialize)]
pub struct ReadAsk {
    path: Text,
    offset: Option<u64>,
    length: Option<u64>,
}

#[derive(Deserialize)]
pub struct WriteAsk {
    path: Text,
    mode: Option<u32>,
    #[serde(default)]
    make_parents: bool,
    #[serde(default)]
    append: bool,
}

pub fn read(ask: &ReadAsk, channel: &mut Channel) -> Outcome<String> {
    let path = ask.path.path()?;
    let what = || path.display().to_string();
    // O_NONBLOCK: a fifo without a writer must not hold the worker.
    let mut file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&path)
        .during(what)?;
    let about = file.metadata().during(what)?;
    if about.is_dir() {
        return Err(Failure::new("is_a_directory", what()));
    }
    if !about.is_file() {
        return Err(Failure::invalid(format!("{}: not a regular file", what())));
    }
    file.seek(SeekFrom::Start(ask.offset.unwrap_or(0))).during(what)?;
    let mode = about.permissions().mode() & 0o7777;
    channel.opened(&Object::new().number("size", about.len()).number("mode", mode).finish());
    let mut buffer = vec![0; CHUNK_BYTES];
    let (mut left, mut bytes) = (ask.length.unwrap_or(u64::MAX), 0);
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        let count = file.read(&mut buffer[..want]).during(what)?;
        if count == 0 {
            break;
        }
        channel.output.write_all(&buffer[..count])?;
        left -= count as u64;
        bytes += count as u64;
    }
    Ok(Object::new().number("bytes", bytes).finish())
}

pub fn write(ask: &WriteAsk, channel: &mut Channel) -> Outcome<String> {
    let path = follow(ask.path.path()?)?;
    let what = || path.display().to_string();
    if ask.make_parents {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).during(|| parent.display().to_string())?;
        }
    }
    let old = fs::metadata(&path).ok();
    match &old {
        Some(old) if old.is_dir() => return Err(Failure::new("is_a_directory", what())),
        Some(old) if !old.is_file() => {
            return Err(Failure::invalid(format!("{}: not a regular file", what())))
        }
        _ => {}
    }
    if ask.append {
        let mut file = File::options()
            .append(true)
            .create(true)
            .mode(ask.mode.unwrap_or(0o644))
            .open(&path)
            .during(what)?;
        channel.opened("{}");
        return receive(channel, &mut file, &path);
    }
    let (temporary, mut file) = temporary(&path).during(what)?;
    remove_at_abort(&temporary).during(what)?;
    channel.opened("{}");
    // A file that is replaced keeps its mode unless another is asked for.
    let mode = ask.mode.or_else(|| old.map(|old| old.mode())).unwrap_or(0o644) & 0o7777;
    let done = receive(channel, &mut file, &path).and_then(|json| {
        fs::set_permissions(&temporary, fs::Permissions::from_mode(mode)).during(what)?;
        fs::rename(&temporary, &path).during(what)?;
        Ok(json)
    });
    if done.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    done
}

/// A link is written through, as by any program that opens it.
fn follow(path: PathBuf) -> Outcome<PathBuf> {
    match path.is_symlink() {
        true => fs::canonicalize(&path).during(|| path.display().to_string()),
        false => Ok(path),
    }
}

fn temporary(path: &Path) -> std::io::Result<(PathBuf, File)> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if path.file_name().is_none() {
        return Err(std::io::Error::from_raw_os_error(libc::EISDIR));
    }
    let mut result = Err(std::io::Error::from_raw_os_error(libc::EEXIST));
    for number in 0..TEMPORARY_TRIES {
        // Short, whatever the name: a name of 255 bytes can be written too.
        let name = folder.join(format!(".cloche-{}-{number}", std::process::id()));
        result =
            File::options().write(true).create_new(true).mode(0o600).open(&name).map(|file| (name, file));
        if !matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EEXIST)) {
            break;
        }
    }
    result
}

fn remove_at_abort(name: &Path) -> std::io::Result<()> {
    // Never freed: the handler may read it until the process ends.
    UNFINISHED.store(CString::new(name.as_os_str().as_bytes())?.into_raw(), Ordering::Release);
    let handler: extern "C" fn(libc::c_int) = give_up;
    // SAFETY: the handler makes only calls that a handler may make.
    unsafe { libc::signal(libc::SIGTERM, handler as libc::sighandler_t) };
    Ok(())
}

/// At ABORT: half a file does not stay under its temporary name.
extern "C" fn give_up(_signal: libc::c_int) {
    // SAFETY: both may be called in a handler; the name is whole before the handler is set, and never freed.
    unsafe {
        libc::unlink(UNFINISHED.load(Ordering::Acquire));
        libc::_exit(0)
    }
}

fn receive(channel: &mut Channel, file: &mut File, path: &Path) -> Outcome<String> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut bytes = 0u64;
    loop {
        let count = channel.input.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        file.write_all(&buffer[..count]).during(|| path.display().to_string())?;
        bytes += count as u64;
    }
    Ok(Object::new().number("bytes", bytes).finish())
}
