//! The guest's resolver. It knows no server: the host says whether some rule could allow a name, and the answer is a
//! synthetic address on which the agent then listens. Nothing that is asked here leaves the node.

use super::dns::{self, Code, Query, Question, TYPE_A};
use super::listeners::Place;
use super::names::{address, Cached};
use super::ASKER;
use crate::json::Object;
use crate::poller::{Want, Watched};
use crate::serve::Agent;
use crate::wire;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

const ASKED_MAX: usize = 64;
const WAITING_MAX: usize = 512;
const PORTS_MAX: usize = 64;
const DATAGRAMS_PER_TURN: usize = 32;
const TTL_S: u32 = 5;
/// Who asks by TCP: how many, how long a question may be, how long one may be silent.
const ASKERS_MAX: usize = 16;
const ASKED_BYTES_MAX: usize = 1_024;
const ASKER_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy)]
enum From {
    Datagram(SocketAddr),
    Asker(u32),
}

/// A name that the host was asked about, and who waits for it.
struct Asked {
    name: String,
    waiting: Vec<(Question, From)>,
}

struct Asker {
    socket: Watched,
    bytes: Vec<u8>,
    until: Instant,
}

#[derive(Default)]
pub struct Resolver {
    pub datagrams: Option<Watched>,
    asked: BTreeMap<u32, Asked>,
    askers: BTreeMap<u32, Asker>,
    next_asker: u32,
}

impl Resolver {
    pub fn asks(&self, stream: u32) -> bool {
        self.asked.contains_key(&stream)
    }

    pub fn due(&self) -> Option<Instant> {
        self.askers.values().map(|asker| asker.until).min()
    }
}

/// A copy of the descriptor as the standard library's type, for one call; it must not close what is not its own.
fn borrowed<T: std::convert::From<OwnedFd>>(fd: &OwnedFd) -> std::mem::ManuallyDrop<T> {
    use std::os::fd::{AsRawFd, FromRawFd};
    // SAFETY: never dropped, so the descriptor stays its owner's.
    std::mem::ManuallyDrop::new(T::from(unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) }))
}

impl Agent {
    pub(crate) fn on_datagrams(&mut self) {
        let mut packet = [0u8; ASKED_BYTES_MAX];
        for _ in 0..DATAGRAMS_PER_TURN {
            let Some(socket) = &self.egress.resolver.datagrams else { return };
            let socket = borrowed::<UdpSocket>(&socket.fd);
            let Ok((count, from)) = socket.recv_from(&mut packet) else { return };
            self.on_query(&packet[..count], From::Datagram(from));
        }
    }

    fn on_query(&mut self, packet: &[u8], from: From) {
        match dns::parse(packet) {
            Query::Ignore => {}
            Query::Answer(answer) => self.reply(from, &answer),
            Query::Question(question) => self.on_question(question, from),
        }
    }

    fn on_question(&mut self, question: Question, from: From) {
        let name = question.name.as_str();
        let is_under =
            |end: &str| name == end || name.strip_suffix(end).is_some_and(|rest| rest.ends_with('.'));
        let answer = if is_under("localhost") {
            answer(&question, Some(Ipv4Addr::LOCALHOST))
        } else if is_under("arpa") {
            answer(&question, None)
        } else {
            match self.egress.names.cached(name, Instant::now()) {
                Cached::Address(address) => answer(&question, Some(address)),
                Cached::Refused => answer(&question, None),
                Cached::Unknown => return self.ask_host(question, from),
            }
        };
        self.reply(from, &answer);
    }

    fn ask_host(&mut self, question: Question, from: From) {
        let asked = &mut self.egress.resolver.asked;
        let waiting: usize = asked.values().map(|asked| asked.waiting.len()).sum();
        let is_full = waiting >= WAITING_MAX;
        let has_room = asked.len() < ASKED_MAX;
        match asked.values_mut().find(|asked| asked.name == question.name) {
            Some(asked) if !is_full => asked.waiting.push((question, from)),
            None if !is_full && has_room => {
                let open = Object::new().text("op", "resolve").text("name", &question.name);
                let open = open.number("type", question.kind).finish();
                let Some(stream) = self.session.open_out("resolve", open.into_bytes()) else { return };
                let name = question.name.clone();
                asked.insert(stream, Asked { name, waiting: vec![(question, from)] });
            }
            _ => self.reply(from, &question.answer(Code::Failed, None)),
        }
    }

    /// The host's answer: ports on which some rule could allow the name, or none.
    pub(crate) fn on_resolved(&mut self, stream: u32, payload: &[u8]) {
        let Some(asked) = self.egress.resolver.asked.remove(&stream) else { return };
        let end = serde_json::from_slice::<wire::End>(payload).ok();
        let ports = end.and_then(|end| end.ok).map(|ok| ok.ports).unwrap_or_default();
        let now = Instant::now();
        let found = if ports.is_empty() {
            self.egress.names.refuse(&asked.name, now);
            Ok(None)
        } else {
            self.listen_for(&asked.name, &ports, now).map(Some)
        };
        for (question, from) in asked.waiting {
            let bytes = match found {
                Ok(address) => answer(&question, address),
                Err(()) => question.answer(Code::Failed, None),
            };
            self.reply(from, &bytes);
        }
    }

    /// All ports before the answer: the client connects at once.
    fn listen_for(&mut self, name: &str, ports: &[u16], now: Instant) -> Result<Ipv4Addr, ()> {
        let number = self.egress.names.allow(name, now).ok_or(())?;
        let address = address(number);
        let (mut open, mut failed) = (0, 0);
        for port in ports.iter().take(PORTS_MAX).filter(|port| **port != 0) {
            match self.listen(Place::Name(number, *port), SocketAddrV4::new(address, *port)) {
                Ok(()) => open += 1,
                // A program of the guest has it: that one gets the connection.
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => open += 1,
                Err(_) => failed += 1,
            }
        }
        if open == 0 && failed > 0 {
            self.egress.names.refuse(name, now);
            return Err(());
        }
        Ok(address)
    }

    /// The host that was asked is gone.
    pub(crate) fn on_unresolved(&mut self, stream: u32) {
        let Some(asked) = self.egress.resolver.asked.remove(&stream) else { return };
        for (question, from) in asked.waiting {
            self.reply(from, &question.answer(Code::Failed, None));
        }
    }

    /// A client that does not take its answer asks again, or has gone.
    fn reply(&mut self, to: From, answer: &[u8]) {
        let resolver = &mut self.egress.resolver;
        match to {
            From::Datagram(address) => {
                if let Some(socket) = &resolver.datagrams {
                    let _ = borrowed::<UdpSocket>(&socket.fd).send_to(answer, address);
                }
            }
            From::Asker(number) => {
                let Some(asker) = resolver.askers.get_mut(&number) else { return };
                let length = (answer.len() as u16).to_be_bytes();
                let framed = [&length[..], answer].concat();
                let mut socket = borrowed::<std::net::TcpStream>(&asker.socket.fd);
                if socket.write_all(&framed).is_err() {
                    self.drop_asker(number);
                }
            }
        }
    }

    // By TCP: two bytes of length before each message.

    pub(crate) fn admit_asker(&mut self, socket: OwnedFd) {
        let resolver = &mut self.egress.resolver;
        if resolver.askers.len() >= ASKERS_MAX {
            return;
        }
        resolver.next_asker = resolver.next_asker.wrapping_add(1);
        let number = resolver.next_asker;
        let mut socket = Watched::new(socket, Want::Read, ASKER | u64::from(number));
        socket.arm(&self.poller, true);
        let until = Instant::now() + ASKER_PATIENCE;
        resolver.askers.insert(number, Asker { socket, bytes: Vec::new(), until });
    }

    pub(crate) fn on_asker(&mut self, number: u32) {
        let Some(asker) = self.egress.resolver.askers.get_mut(&number) else { return };
        let mut piece = [0u8; ASKED_BYTES_MAX];
        match borrowed::<std::net::TcpStream>(&asker.socket.fd).read(&mut piece) {
            Ok(count) if count > 0 => asker.bytes.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
            _ => return self.drop_asker(number),
        }
        while let Some(asker) = self.egress.resolver.askers.get_mut(&number) {
            let Some((length, rest)) = asker.bytes.split_first_chunk::<2>() else { return };
            let length = usize::from(u16::from_be_bytes(*length));
            if length > ASKED_BYTES_MAX {
                return self.drop_asker(number);
            }
            let Some(packet) = rest.get(..length).map(<[u8]>::to_vec) else { return };
            asker.bytes.drain(..2 + length);
            asker.until = Instant::now() + ASKER_PATIENCE;
            self.on_query(&packet, From::Asker(number));
        }
    }

    fn drop_asker(&mut self, number: u32) {
        if let Some(asker) = self.egress.resolver.askers.remove(&number) {
            asker.socket.close(&self.poller);
        }
    }

    pub(crate) fn drop_slow_askers(&mut self) {
        if self.egress.resolver.askers.is_empty() {
            return;
        }
        let now = Instant::now();
        let slow = self.egress.resolver.askers.iter().filter(|(_, asker)| asker.until <= now);
        let slow: Vec<u32> = slow.map(|(number, _)| *number).collect();
        slow.into_iter().for_each(|number| self.drop_asker(number));
    }
}

/// NXDOMAIN without an address; with one, it is for who asked for A. No other record of any name exists.
fn answer(question: &Question, address: Option<Ipv4Addr>) -> Vec<u8> {
    match address {
        None => question.answer(Code::NoName, None),
        Some(address) => {
            let record = (question.kind == TYPE_A).then_some((address, TTL_S));
            question.answer(Code::Ok, record)
        }
    }
}
