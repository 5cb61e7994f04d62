//! `fs.stat`, `fs.list`, `fs.mkdir`, `fs.move`, `fs.remove`, inside a worker.

use crate::failure::{During, Failure, Outcome};
use crate::json::Object;
use crate::users::Users;
use crate::wire::Text;
use crate::worker::Channel;
use serde::Deserialize;
use std::fs::{self, Metadata};
use std::io::{BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

const BUFFER_BYTES: usize = 65_536;

#[derive(Deserialize)]
pub struct StatAsk {
    path: Text,
    #[serde(default)]
    follow: bool,
}

#[derive(Deserialize)]
pub struct ListAsk {
    path: Text,
    depth: Option<u32>,
}

#[derive(Deserialize)]
pub struct MakeAsk {
    path: Text,
    #[serde(default)]
    parents: bool,
    mode: Option<u32>,
}

#[derive(Deserialize)]
pub struct MoveAsk {
    from: Text,
    to: Text,
    #[serde(default)]
    overwrite: bool,
}

#[derive(Deserialize)]
pub struct RemoveAsk {
    path: Text,
    #[serde(default)]
    recursive: bool,
}

fn type_name(about: &Metadata) -> &'static str {
    let kind = about.file_type();
    match () {
        () if kind.is_file() => "file",
        () if kind.is_dir() => "dir",
        () if kind.is_symlink() => "symlink",
        () if kind.is_fifo() => "fifo",
        () if kind.is_socket() => "socket",
        () if kind.is_char_device() => "char",
        () => "block",
    }
}

fn entry(path: &Path, about: &Metadata, users: &Users) -> String {
    let name = path.file_name().map_or(&b"/"[..], |name| name.as_bytes());
    let mtime_ns = i128::from(about.mtime()) * 1_000_000_000 + i128::from(about.mtime_nsec());
    let mut object = Object::new()
        .text("name", name)
        .text("path", path.as_os_str().as_bytes())
        .text("type", type_name(about))
        .number("size", about.len())
        .number("mode", about.mode() & 0o7777)
        .number("uid", about.uid())
        .number("gid", about.gid())
        .number("mtime_ns", mtime_ns);
    if let Some(user) = users.user_name(about.uid()) {
        object = object.text("user", user);
    }
    if let Some(group) = users.group_name(about.gid()) {
        object = object.text("group", group);
    }
    if let (true, Ok(target)) = (about.is_symlink(), fs::read_link(path)) {
        object = object.text("target", target.as_os_str().as_bytes());
    }
    object.finish()
}

pub fn stat(ask: &StatAsk, users: &Users) -> Outcome<String> {
    let path = ask.path.path()?;
    let about = if ask.follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
    let about = about.during(|| path.display().to_string())?;
    Ok(Object::new().raw("entry", &entry(&path, &about, users)).finish())
}

pub fn list(ask: &ListAsk, channel: &mut Channel, users: &Users) -> Outcome<String> {
    let path = ask.path.path()?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, &*channel.output);
    let mut count = 0u64;
    list_folder(&path, ask.depth.unwrap_or(1).max(1), &mut out, &mut count, users)
        .during(|| path.display().to_string())?;
    out.flush()?;
    Ok(Object::new().number("entries", count).finish())
}

fn sorted(folder: &Path) -> std::io::Result<Vec<fs::DirEntry>> {
    let mut entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    Ok(entries)
}

fn list_folder(
    folder: &Path,
    depth: u32,
    out: &mut impl Write,
    count: &mut u64,
    users: &Users,
) -> std::io::Result<()> {
    for found in sorted(folder)? {
        let path = found.path();
        // Removed since it was read: then it is not there.
        let Ok(about) = found.metadata() else { continue };
        out.write_all(entry(&path, &about, users).as_bytes())?;
        out.write_all(b"\n")?;
        *count += 1;
        if depth > 1 && about.is_dir() {
            match list_folder(&path, depth - 1, out, count, users) {
                // A folder below that may not be read is listed, and its content is not.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

pub fn make(ask: &MakeAsk) -> Outcome<String> {
    let path = ask.path.path()?;
    let what = || path.display().to_string();
    let created = |yes| Ok(Object::new().flag("created", yes).finish());
    if ask.parents && path.is_dir() {
        return created(false);
    }
    let mode = ask.mode.unwrap_or(0o755) & 0o7777;
    if let (true, Some(parent)) = (ask.parents, path.parent()) {
        fs::create_dir_all(parent).during(what)?;
    }
    fs::DirBuilder::new().mode(mode).create(&path).during(what)?;
    if ask.mode.is_some() {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).during(what)?;
    }
    created(true)
}

pub fn move_to(ask: &MoveAsk) -> Outcome<String> {
    let (from, to) = (ask.from.path()?, ask.to.path()?);
    let what = || format!("{} to {}", from.display(), to.display());
    if !ask.overwrite && to.symlink_metadata().is_ok() {
        return Err(Failure::new("exists", to.display().to_string()));
    }
    match rename(&from, &to, ask.overwrite) {
        // Mounts of one sandbox are one place to its user: /tmp to /workspace is a move.
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
            copy(&from, &to).during(what)?;
            delete(&from, &mut 0).during(what)?;
        }
        other => other.during(what)?,
    }
    Ok("{}".into())
}

fn rename(from: &Path, to: &Path, overwrite: bool) -> std::io::Result<()> {
    use rustix::fs::{renameat_with, RenameFlags, CWD};
    if overwrite {
        return fs::rename(from, to);
    }
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => fs::rename(from, to),
        other => Ok(other?),
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let about = from.symlink_metadata()?;
    if about.is_symlink() {
        return std::os::unix::fs::symlink(fs::read_link(from)?, to);
    }
    if about.is_file() {
        fs::copy(from, to)?;
    } else if about.is_dir() {
        fs::create_dir(to)?;
        for found in fs::read_dir(from)? {
            let found = found?;
            copy(&found.path(), &to.join(found.file_name()))?;
        }
        fs::set_permissions(to, about.permissions())?;
    } else {
        return Err(std::io::Error::from_raw_os_error(libc::EXDEV));
    }
    let times = fs::FileTimes::new().set_modified(about.modified()?);
    fs::File::open(to).and_then(|file| file.set_times(times)).or(Ok(()))
}

pub fn remove(ask: &RemoveAsk) -> Outcome<String> {
    let path = ask.path.path()?;
    let what = || path.display().to_string();
    let mut removed = 0u64;
    let about = path.symlink_metadata().during(what)?;
    match (about.is_dir(), ask.recursive) {
        (true, false) => fs::remove_dir(&path).map(|()| removed = 1).during(what)?,
        _ => delete(&path, &mut removed).during(what)?,
    }
    Ok(Object::new().number("removed", removed).finish())
}

fn delete(path: &Path, removed: &mut u64) -> std::io::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        for found in fs::read_dir(path)? {
            delete(&found?.path(), removed)?;
        }
        fs::remove_dir(path)?;
    } else {
        fs::remove_file(path)?;
    }
    *removed += 1;
    Ok(())
}
