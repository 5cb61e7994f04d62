//! Why an operation failed, in the words of the contract.

use crate::json::Object;
use std::io;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: &'static str,
    pub message: String,
}

pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Failure { code, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Failure::new("invalid", message)
    }

    /// `what` was being done when the system said no.
    pub fn os(what: &str, errno: i32) -> Self {
        let reason = io::Error::from_raw_os_error(errno);
        Failure::new(code_of(errno), format!("{what}: {reason}"))
    }

    pub fn end(&self) -> Vec<u8> {
        Object::new().raw("error", &self.json()).finish().into_bytes()
    }

    pub fn json(&self) -> String {
        Object::new().text("code", self.code).text("message", &self.message).finish()
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::new(error.raw_os_error().map_or("io", code_of), error.to_string())
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Self {
        io::Error::from(errno).into()
    }
}

/// Names the step in the message, as `context` does elsewhere.
pub trait During<T> {
    fn during(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T, E: Into<Failure>> During<T> for Result<T, E> {
    fn during(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|error| {
            let failure: Failure = error.into();
            Failure { message: format!("{}: {}", what(), failure.message), ..failure }
        })
    }
}

pub fn code_of(errno: i32) -> &'static str {
    match errno {
        libc::ENOENT => "not_found",
        libc::EACCES | libc::EPERM => "permission_denied",
        libc::EEXIST => "exists",
        libc::ENOTDIR => "not_a_directory",
        libc::EISDIR => "is_a_directory",
        libc::ENOTEMPTY => "not_empty",
        libc::ENOSPC | libc::EDQUOT => "no_space",
        libc::EROFS => "read_only",
        libc::EFBIG | libc::E2BIG => "too_large",
        libc::EINVAL | libc::EXDEV => "invalid",
        libc::ENAMETOOLONG => "name_too_long",
        libc::ELOOP => "loop",
        libc::EBUSY | libc::ETXTBSY | libc::EAGAIN => "busy",
        libc::ECONNREFUSED => "refused",
        libc::ENOSYS | libc::EOPNOTSUPP => "unsupported",
        libc::ENOEXEC => "not_executable",
        _ => "io",
    }
}
