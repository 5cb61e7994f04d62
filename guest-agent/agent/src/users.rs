//! Users and groups, read by hand: libc's lookups would load modules that an image may not have.

use crate::failure::{Failure, Outcome};
use cloche_protocol::limits::AGENT_UID;
use std::fs::File;
use std::io::Read;

const FILE_BYTES_MAX: u64 = 1 << 20;
const GROUPS_MAX: usize = 1_024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub name: Option<Vec<u8>>,
    pub home: Vec<u8>,
}

/// `/etc/passwd` and `/etc/group`, as far as they exist.
#[derive(Default)]
pub struct Users {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

struct Account<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

impl Users {
    pub fn read() -> Self {
        Users { passwd: read_bounded("/etc/passwd"), group: read_bounded("/etc/group") }
    }

    pub fn new(passwd: &[u8], group: &[u8]) -> Self {
        Users { passwd: passwd.to_vec(), group: group.to_vec() }
    }

    pub fn is_empty(&self) -> bool {
        self.passwd.is_empty()
    }

    fn accounts(&self) -> impl Iterator<Item = Account<'_>> {
        self.passwd.split(|byte| *byte == b'\n').filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let uid = number(fields.nth(1)?)?;
            let gid = number(fields.next()?)?;
            Some(Account { name, uid, gid, home: fields.nth(1).unwrap_or(b"") })
        })
    }

    /// name, gid, members
    fn groups(&self) -> impl Iterator<Item = (&[u8], u32, &[u8])> {
        self.group.split(|byte| *byte == b'\n').filter_map(|line| {
            let mut fields = line.split(|byte| *byte == b':');
            let name = fields.next().filter(|name| !name.is_empty())?;
            let gid = number(fields.nth(1)?)?;
            Some((name, gid, fields.next().unwrap_or(b"")))
        })
    }

    pub fn user_name(&self, uid: u32) -> Option<&[u8]> {
        self.accounts().find(|account| account.uid == uid).map(|account| account.name)
    }

    pub fn group_name(&self, gid: u32) -> Option<&[u8]> {
        self.groups().find(|group| group.1 == gid).map(|group| group.0)
    }

    /// "name", "uid", "uid:gid", "name:group". A bare uid without an account has gid 0, as in other runtimes.
    pub fn resolve(&self, text: &str) -> Outcome<Identity> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let unknown = || Failure::new("no_such_user", format!("no user {text:?} in this image"));
        let by_name = self.accounts().find(|account| account.name == user.as_bytes());
        let account = match (by_name, number(user.as_bytes())) {
            (Some(account), _) => Some(account),
            (None, Some(uid)) => self.accounts().find(|account| account.uid == uid),
            // Every system has a root, even one without files.
            (None, None) if user == "root" => None,
            (None, None) => return Err(unknown()),
        };
        let uid = account.as_ref().map_or_else(|| number(user.as_bytes()).unwrap_or(0), |a| a.uid);
        let gid = match group {
            None => account.as_ref().map_or(0, |a| a.gid),
            Some(group) => self
                .groups()
                .find(|entry| entry.0 == group.as_bytes())
                .map(|entry| entry.1)
                .or_else(|| number(group.as_bytes()))
                .ok_or_else(unknown)?,
        };
        let mut groups = match (&account, group) {
            (Some(account), None) => self.groups_of(account.name),
            _ => Vec::new(),
        };
        groups.retain(|id| *id != gid);
        if uid == AGENT_UID || gid == AGENT_UID || groups.contains(&AGENT_UID) {
            return Err(Failure::new("no_such_user", "uid and gid 64000 belong to the agent"));
        }
        let home = account.as_ref().map(|a| a.home).filter(|home| !home.is_empty());
        let home = home.unwrap_or(if uid == 0 { b"/root" } else { b"/" }).to_vec();
        let name = account.map(|a| a.name.to_vec()).or_else(|| (uid == 0).then(|| b"root".to_vec()));
        Ok(Identity { uid, gid, groups, name, home })
    }

    fn groups_of(&self, name: &[u8]) -> Vec<u32> {
        self.groups()
            .filter(|(_, _, members)| members.split(|byte| *byte == b',').any(|member| member == name))
            .map(|(_, gid, _)| gid)
            .take(GROUPS_MAX)
            .collect()
    }
}

/// Decimal, without sign, and not the id that means "unchanged".
fn number(text: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(text).ok()?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok().filter(|id| *id != u32::MAX)
}

fn read_bounded(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A missing or unreadable file is an image without users, not an error.
    if let Ok(file) = open_regular(path) {
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    bytes
}

/// Never blocks: the image may have put a fifo there.
fn open_regular(path: &str) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::ErrorKind::InvalidInput.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::new(
            b"root:x:0:0:root:/root:/bin/sh\n# no\nbroken:x\nanna:x:1000:1001::/home/anna:/bin/sh\n1234:x:7:7::/h:\nagent:x:64000:64000::/:\n",
            b"root:x:0:\nstaff:x:50:anna,otto\nanna:x:1001:\nwheel:x:10:otto,anna\nbad:x:y:anna\n",
        )
    }

    #[test]
    fn resolves_all_forms() {
        let anna = users().resolve("anna").expect("anna");
        assert_eq!((anna.uid, anna.gid, anna.groups.as_slice()), (1000, 1001, &[50, 10][..]));
        assert_eq!(anna.home, b"/home/anna");
        assert_eq!(users().resolve("1000").expect("by uid"), anna);
        let pair = users().resolve("1000:0").expect("pair");
        assert_eq!((pair.gid, pair.groups.len()), (0, 0));
        assert_eq!(users().resolve("anna:staff").expect("group").gid, 50);
        let stranger = users().resolve("4242").expect("a bare uid");
        assert_eq!((stranger.uid, stranger.gid, stranger.home.as_slice()), (4242, 0, &b"/"[..]));
        assert_eq!(users().resolve("1234").expect("a name of digits is a name").uid, 7);
    }

    #[test]
    fn refuses() {
        for (text, code) in [
            ("nobody", "no_such_user"),
            ("anna:none", "no_such_user"),
            ("", "no_such_user"),
            ("-1", "no_such_user"),
            ("4294967295", "no_such_user"),
            ("64000", "no_such_user"),
            ("agent", "no_such_user"),
            ("1000:64000", "no_such_user"),
        ] {
            assert_eq!(users().resolve(text).expect_err(text).code, code, "{text}");
        }
    }

    #[test]
    fn works_without_files() {
        let none = Users::default();
        assert_eq!(none.resolve("root").expect("root").home, b"/root");
        assert_eq!(none.resolve("1000:1000").expect("ids").gid, 1000);
        assert_eq!(none.resolve("anna").expect_err("anna").code, "no_such_user");
    }
}
