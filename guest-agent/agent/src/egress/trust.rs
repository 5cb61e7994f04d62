//! `trust`: certificates that programs in the guest believe, beside those of the image.

use crate::bind::{bind_with, own_folder, OWN};
use crate::failure::{During, Failure, Outcome};
use crate::json::{list, Object};
use crate::operation::{Operation, Task};
use crate::serve::{ok, Agent};
use crate::wire;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

const CONTENT_BYTES_MAX: usize = 4 << 20;
const SYSTEM_BYTES_MAX: u64 = 2 << 20;
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const JAVA_STORES: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/java/cacerts"];

/// A file that the host is sending.
pub struct Trust {
    name: &'static str,
    content: Vec<u8>,
}

/// What earlier ones did: a restored sandbox gets them again.
#[derive(Default)]
pub struct Trusted {
    /// The image's own certificates, before anything was put over them.
    system: Option<Vec<u8>>,
    over: BTreeSet<PathBuf>,
}

pub fn start(ask: &wire::Trust) -> Outcome<Operation> {
    let name = match ask.name.as_str() {
        "trust.pem" => "trust.pem",
        "cacerts" => "cacerts",
        other => return Err(Failure::invalid(format!("no trust file {other:?}"))),
    };
    Ok(Operation::new(Task::Trust(Trust { name, content: Vec::new() })))
}

/// The image's file, if it is one: a pipe or a device there must not stop the agent.
fn read_regular(path: &str) -> Option<Vec<u8>> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    if !metadata.is_file() || metadata.len() > SYSTEM_BYTES_MAX {
        return None;
    }
    let mut content = Vec::new();
    file.take(SYSTEM_BYTES_MAX).read_to_end(&mut content).ok()?;
    Some(content)
}

impl Trusted {
    /// Writes the file and puts it over the image's own; the paths that now show it.
    fn place(&mut self, trust: &Trust) -> Outcome<Vec<&'static str>> {
        let own = format!("{OWN}/{}", trust.name);
        let (targets, system): (&[&'static str], &[u8]) = match trust.name {
            "cacerts" => (&JAVA_STORES, b""),
            _ => (
                &BUNDLES,
                self.system
                    .get_or_insert_with(|| BUNDLES.iter().find_map(|p| read_regular(p)).unwrap_or_default()),
            ),
        };
        let between: &[u8] = if system.is_empty() || trust.content.ends_with(b"\n") { b"" } else { b"\n" };
        let content = [&trust.content[..], between, system].concat();
        // In place: what is mounted already shows it at once.
        fs::write(&own, content).during(|| own.clone())?;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o444)).during(|| own.clone())?;
        std::os::unix::fs::chown(&own, Some(0), Some(0)).during(|| own.clone())?;
        let mut over = Vec::new();
        for target in targets {
            // Several names may lead to one file.
            let Ok(real) = fs::canonicalize(target) else { continue };
            if !self.over.contains(&real) {
                if !fs::metadata(&real).is_ok_and(|metadata| metadata.is_file()) {
                    continue;
                }
                let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                let path = real.to_str().ok_or_else(|| Failure::invalid("a path that is not UTF-8"))?;
                bind_with(&own, path, flags).during(|| (*target).into())?;
                self.over.insert(real);
            }
            over.push(*target);
        }
        Ok(over)
    }
}

impl Agent {
    pub(crate) fn admit_trust(&mut self, id: u32, operation: Operation) {
        self.operations.insert(id, operation);
        self.session.want_input(id);
        self.session.opened(id, "{}".into());
        self.take_trust(id);
    }

    /// Bytes for the file, or its end.
    pub(crate) fn take_trust(&mut self, id: u32) {
        let Some(Operation { task: Task::Trust(trust), .. }) = self.operations.get_mut(&id) else { return };
        loop {
            let bytes = self.session.input(id);
            if bytes.is_empty() {
                break;
            }
            if trust.content.len() + bytes.len() > CONTENT_BYTES_MAX {
                self.session.end(id, Failure::new("too_large", "at most 4 MiB").end());
                self.operations.remove(&id);
                return;
            }
            trust.content.extend_from_slice(bytes);
            let count = bytes.len();
            self.session.taken(id, count);
        }
        if !self.session.input_is_over(id) {
            return;
        }
        let placed = match self.mounts {
            true => {
                own_folder(&mut self.bound).map_err(Failure::from).and_then(|()| self.trusted.place(trust))
            }
            false => Err(Failure::new("unsupported", "this agent mounts nothing")),
        };
        let end = match placed {
            Ok(over) => ok(&Object::new().raw("over", &list(over)).finish()),
            Err(failure) => failure.end(),
        };
        self.operations.remove(&id);
        self.session.end(id, end);
    }
}
