//! The guest's end of the only way out: proxy addresses, a resolver, and one stream for each connection.
//!
//! Words: a *slot* is a proxy address of its own, so that the host can tell which command a connection belongs to;
//! a *synthetic address* stands for a name that some rule could allow; a *tunnel* is an accepted connection and
//! its stream. Nothing is decided here, and no name is looked up: the host reads the bytes and says END to what
//! it does not allow.

pub mod dns;
pub mod listeners;
pub mod names;
pub mod resolver;
pub mod trust;
pub mod tunnels;

use crate::guest::is_guests;
use crate::operation::of_token;
use crate::poller::Ready;
use crate::serve::Agent;
use crate::session::Event;
use std::time::Instant;

/// Tokens of this module: those of tunnels (streams with odd ids), and numbers that no stream has.
const LISTENER: u64 = 1 << 60;
const RESOLVER: u64 = 1 << 61;
const ASKER: u64 = 1 << 62;

#[derive(Default)]
pub struct Egress {
    /// False: this process has no network of its own (tests), and leaves the machine's alone.
    allowed: bool,
    /// None: `bind` asked for none of this.
    proxy_port: Option<u16>,
    listeners: listeners::Listeners,
    tunnels: tunnels::Tunnels,
    names: names::Names,
    resolver: resolver::Resolver,
}

impl Egress {
    pub fn new(allowed: bool) -> Self {
        Egress { allowed, ..Egress::default() }
    }
}

pub fn is_ours(token: u64) -> bool {
    token >= LISTENER || is_guests(of_token(token).0)
}

impl Agent {
    pub(crate) fn on_egress(&mut self, ready: Ready) {
        let index = (ready.token & u64::from(u32::MAX)) as u32;
        match ready.token {
            ASKER.. => self.on_asker(index),
            RESOLVER.. => self.on_datagrams(),
            LISTENER.. => self.on_listener(index as usize),
            token => self.on_tunnel(of_token(token).0, ready),
        }
    }

    /// What happened to a stream that the guest opened.
    pub(crate) fn on_guest_event(&mut self, event: Event) {
        match event {
            Event::Input(stream) => self.on_tunnel_input(stream),
            Event::Room(stream) => self.watch_tunnel(stream),
            Event::Ended { stream, payload } if self.egress.resolver.asks(stream) => {
                self.session.forget_out(stream);
                self.on_resolved(stream, &payload);
            }
            Event::Ended { stream, payload } => self.on_tunnel_end(stream, &payload),
            Event::Close(stream) if self.egress.resolver.asks(stream) => self.on_unresolved(stream),
            Event::Close(stream) => self.cut(stream),
            _ => {}
        }
    }

    /// When something here must happen although nothing else does.
    pub(crate) fn egress_due(&self) -> Option<Instant> {
        let egress = &self.egress;
        [egress.listeners.due(), egress.tunnels.due(), egress.resolver.due()].into_iter().flatten().min()
    }

    pub(crate) fn egress_on_time(&mut self) {
        if self.egress.proxy_port.is_some() {
            self.accept_again();
            self.end_lingering();
            self.drop_slow_askers();
        }
    }
}
