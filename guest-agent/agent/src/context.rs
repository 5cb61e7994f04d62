//! What operations need to start: what `bind` said, the agent's rights, and things made once for many commands.

use crate::child::Stack;
use crate::failure::Outcome;
use crate::rights::Rights;
use crate::users::Users;
use crate::wire;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// What `bind` said, for all later commands.
#[derive(Default)]
pub struct Config {
    pub env: BTreeMap<Vec<u8>, Vec<u8>>,
    pub user: String,
    pub limits: wire::Limits,
}

/// What operations need to start.
pub struct Context {
    pub config: Config,
    pub rights: Rights,
    pub stack: Stack,
    nothing: Option<OwnedFd>,
    users: Option<(Stamp, Users)>,
}

type Stamp = [Option<(u64, i64, i64, i64)>; 2];

impl Context {
    pub fn new(rights: Rights) -> Self {
        let config = Config { user: "0".into(), ..Config::default() };
        Context { config, rights, stack: Stack::default(), nothing: None, users: None }
    }

    /// An empty stdin, opened once.
    pub fn nothing(&mut self) -> Outcome<OwnedFd> {
        if self.nothing.is_none() {
            let null = std::fs::File::open("/dev/null").map(OwnedFd::from);
            // An image may lack /dev/null; a pipe without a writer reads the same.
            self.nothing = Some(
                null.or_else(|_| rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map(|p| p.0))?,
            );
        }
        Ok(self.nothing.as_ref().expect("just set").try_clone()?)
    }

    /// Users as the files say now; read again only when one of them changed.
    pub fn users(&mut self) -> &Users {
        let stamp = ["/etc/passwd", "/etc/group"].map(|path| {
            let s = rustix::fs::stat(path).ok()?;
            Some((s.st_ino, s.st_size, s.st_mtime as i64, s.st_mtime_nsec as i64))
        });
        if self.users.as_ref().is_none_or(|(known, _)| *known != stamp) {
            self.users = Some((stamp, Users::read()));
        }
        &self.users.as_ref().expect("just set").1
    }
}
