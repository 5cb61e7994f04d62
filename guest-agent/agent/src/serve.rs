//! The loop: carrier, signals and the descriptors of operations, one turn after another.

use crate::bind::{self, Bound};
use crate::calls;
use crate::carrier::{Carrier, Received, READ_BYTES_MAX, READ_BYTES_MIN};
use crate::context::Context;
use crate::egress::trust::Trusted;
use crate::egress::{self, Egress};
use crate::failure::{Failure, Outcome};
use crate::guest::is_guests;
use crate::json::{list, Object};
use crate::operation::{of_token, Exit, Operation, Role, Task, Worker};
use crate::poller::{check, Poller, Ready, Want};
use crate::rights::harden;
use crate::session::{Event, Session};
use crate::wire;
use crate::{exec, port, stats, worker};
use cloche_protocol::limits::{GENERATION, OPS};
use cloche_protocol::Decoder;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

const CARRIER: u64 = 0;
const SIGNALS: u64 = 1;
/// Commands are 20 characters; longer ones would make STATE too large for a frame.
const COMMAND_BYTES_MAX: usize = 64;
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(1);
/// How long OPENED of a command waits for something to go with it. Nobody needs it alone, and sending it while the
/// command starts takes the processor from the command; a quick one says all it has to say in one write.
const OPENED_PATIENCE: Duration = Duration::from_millis(5);

pub struct Agent {
    pub(crate) session: Session,
    pub(crate) poller: Poller,
    pub(crate) operations: BTreeMap<u32, Operation>,
    pub(crate) by_pid: BTreeMap<i32, u32>,
    /// Commands that have exited and may still say something.
    pub(crate) draining: BTreeSet<u32>,
    pub(crate) context: Context,
    pub(crate) scratch: Vec<u8>,
    pub(crate) egress: Egress,
    pub(crate) bound: Bound,
    pub(crate) trusted: Trusted,
    pub(crate) mounts: bool,
    decoder: Decoder,
    /// What one receive asks for: small until the host sends much, because every page of a buffer costs a fault.
    read_bytes: usize,
    /// A command that this turn started, and that reads nothing from the host.
    just_opened: Option<u32>,
    carrier: Carrier,
    signals: OwnedFd,
    carrier_rests_until: Option<Instant>,
    stop_at: Option<Instant>,
}

fn hello() -> String {
    let mut boot = [0u8; 16];
    // Without randomness the id is merely not unique.
    let _ = rustix::rand::getrandom(&mut boot[..], rustix::rand::GetRandomFlags::NONBLOCK);
    let boot: String = boot.iter().map(|byte| format!("{byte:02x}")).collect();
    Object::new()
        .number("gen", GENERATION)
        .text("agent", env!("CARGO_PKG_VERSION"))
        .text("arch", std::env::consts::ARCH)
        .text("boot", boot)
        .raw("ops", &list(OPS))
        .finish()
}

/// SIGCHLD as a descriptor.
fn signals() -> io::Result<OwnedFd> {
    // SAFETY: a zeroed set is filled before use; the result is a fresh descriptor.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        let fd = check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

impl Agent {
    /// HELLO leaves here, before anything else that takes time.
    pub fn new(mut carrier: Carrier, mounts: bool, egress: bool) -> io::Result<Self> {
        if mounts {
            // A dummy mount that exists only to make gVisor choose a disk layer. Before HELLO, because after it
            // the host ends the process behind that mount, and then even its name cannot be resolved.
            let _ = rustix::mount::unmount("/.cloche/placeholder", rustix::mount::UnmountFlags::DETACH);
        }
        let mut session = Session::new(hello());
        let sent = carrier.send(session.out.pending());
        session.out.wrote(sent);
        carrier.enlarge();
        let signals = signals()?;
        let rights = harden();
        let poller = Poller::new()?;
        poller.add(signals.as_raw_fd(), Want::Read, SIGNALS)?;
        Ok(Agent {
            session,
            poller,
            operations: BTreeMap::new(),
            by_pid: BTreeMap::new(),
            draining: BTreeSet::new(),
            context: Context::new(rights),
            scratch: Vec::new(),
            egress: Egress::new(egress),
            bound: Bound::default(),
            trusted: Trusted::default(),
            mounts,
            decoder: Decoder::new(),
            read_bytes: READ_BYTES_MIN,
            just_opened: None,
            carrier,
            signals,
            carrier_rests_until: None,
            stop_at: None,
        })
    }

    /// Serves until the host is gone for good or asks for the end.
    pub fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            if self.just_opened.take().is_some_and(|stream| self.session.has_only(stream)) {
                self.poller.wait(Some(OPENED_PATIENCE), &mut ready);
            } else {
                self.flush();
                if self.stop_at.is_some_and(|at| self.session.out.is_empty() || at <= Instant::now()) {
                    return Ok(());
                }
                self.poller.wait(self.timeout(), &mut ready);
            }
            for one in ready.drain(..) {
                match one.token {
                    CARRIER => {
                        if !self.on_carrier(one)? {
                            return Ok(());
                        }
                    }
                    SIGNALS => self.reap(),
                    token if egress::is_ours(token) => self.on_egress(one),
                    token => self.on_operation(token),
                }
            }
            self.on_time();
        }
    }

    /// One write a turn; what does not fit waits for the carrier, never the other way round.
    fn flush(&mut self) {
        if self.carrier_rests_until.is_some() {
            return;
        }
        self.session.fill();
        if !self.session.out.is_empty() {
            let sent = self.carrier.send(self.session.out.pending());
            self.session.out.wrote(sent);
        }
        self.carrier.register(&self.poller, CARRIER, !self.session.out.is_empty());
    }

    fn timeout(&self) -> Option<Duration> {
        if self.carrier_rests_until.is_none() && self.session.out.is_empty() && self.session.has_more() {
            return Some(Duration::ZERO);
        }
        let quiet = self.draining.iter().filter_map(|id| match &self.operations.get(id)?.task {
            Task::Command(command) => command.quiet_at,
            _ => None,
        });
        let own = self.carrier_rests_until.into_iter().chain(self.stop_at).chain(self.egress_due());
        let next = quiet.chain(own).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn on_time(&mut self) {
        let now = Instant::now;
        if self.carrier_rests_until.is_some_and(|until| until <= now()) {
            self.carrier_rests_until = None;
        }
        if !self.draining.is_empty() {
            self.stop_waiting_for_output(now());
        }
        self.egress_on_time();
    }

    /// False: the host is gone for good.
    fn on_carrier(&mut self, ready: Ready) -> io::Result<bool> {
        if !ready.read {
            return Ok(true);
        }
        match self.carrier.receive(self.decoder.space(self.read_bytes))? {
            Received::Bytes(count) => {
                if count >= self.read_bytes {
                    self.read_bytes = (self.read_bytes * 4).min(READ_BYTES_MAX);
                }
                self.decoder.filled(count);
                self.decode();
            }
            Received::Nothing if !ready.hung_up => {}
            Received::Gone if self.carrier.is_socket() => return Ok(false),
            _ => self.carrier_rests_until = Some(Instant::now() + self.carrier.rest(&self.poller)),
        }
        Ok(true)
    }

    fn decode(&mut self) {
        let mut events = Vec::new();
        loop {
            // An error makes the decoder look for RESET; there is nobody to complain to.
            match self.decoder.next() {
                None => return,
                Some(Err(_)) => continue,
                Some(Ok(frame)) => {
                    let frame = self.egress.hand_over(frame, &mut self.session);
                    self.session.handle(frame, &mut events);
                }
            }
            for event in events.drain(..) {
                self.on_event(event);
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Open { stream, payload } => self.on_open(stream, &payload),
            Event::Ended { .. } => self.on_guest_event(event),
            Event::Input(stream) | Event::Room(stream) | Event::Close(stream) if is_guests(stream) => {
                self.on_guest_event(event);
            }
            Event::Input(stream) => self.take_input(stream),
            Event::Room(stream) => self.arm_outputs(stream),
            Event::Tell { stream, payload } => self.on_tell(stream, &payload),
            Event::Abort(stream) => self.abort(stream),
            Event::Forget(stream) | Event::Close(stream) => self.discard(stream),
        }
    }

    fn on_open(&mut self, stream: u32, payload: &[u8]) {
        if wire::check_depth(payload).is_err() {
            return;
        }
        let head = wire::parse::<wire::Head>(payload);
        if self.session.is_open(stream) {
            let command = head.ok().and_then(|head| head.command);
            if command.is_some() && command.as_deref() == self.session.command_of(stream) {
                self.session.answer_again(stream);
            }
            return;
        }
        if !self.session.may_open(stream) {
            return;
        }
        match head.and_then(|head| check_head(stream, head)) {
            Err(failure) => {
                self.session.open(stream, "?", None, None);
                self.session.end(stream, failure.end());
            }
            Ok(head) => self.begin(stream, &head, payload),
        }
    }

    fn begin(&mut self, stream: u32, head: &wire::Head, payload: &[u8]) {
        if !self.session.open(stream, &head.op, head.command.as_deref(), head.stderr_stream) {
            self.session.refuse(stream, &Failure::new("refused", "too many streams").end());
            return;
        }
        let outcome = match head.op.as_str() {
            "bind" => wire::parse(payload)
                .and_then(|ask| self.bind(&ask))
                .map(|end| self.session.end(stream, end.into_bytes())),
            "trust" => wire::parse(payload)
                .and_then(|ask| egress::trust::start(&ask))
                .map(|operation| self.admit_trust(stream, operation)),
            "exec" => wire::parse(payload).and_then(|ask| self.exec(stream, head.stderr_stream, &ask)),
            "stats" => {
                let commands =
                    self.operations.values().filter(|o| matches!(o.task, Task::Command(_))).count();
                self.session.end(stream, ok(&stats::read(commands)));
                Ok(())
            }
            "shutdown" => {
                self.session.end(stream, ok("{}"));
                self.stop_at = Some(Instant::now() + SHUTDOWN_PATIENCE);
                Ok(())
            }
            "port.connect" => wire::parse(payload)
                .and_then(|ask| port::start(stream, &ask))
                .map(|operation| self.admit(stream, operation)),
            op if worker::is_worker(op) => worker::start(&mut self.context, stream, op, payload)
                .map(|operation| self.admit_worker(stream, operation)),
            other => Err(Failure::new("unsupported", format!("no operation {other:?}"))),
        };
        if let Err(failure) = outcome {
            self.session.end(stream, failure.end());
        }
    }

    fn bind(&mut self, ask: &wire::Bind) -> Outcome<String> {
        let warnings =
            ask.egress.as_ref().map_or_else(Vec::new, |egress| self.start_egress(egress.proxy_port));
        bind::run(ask, &mut self.context.config, &mut self.bound, self.mounts, warnings)
    }

    fn exec(&mut self, stream: u32, stderr: Option<u32>, ask: &wire::Exec) -> Outcome<()> {
        if let Some(slot) = ask.proxy_slot {
            self.open_slot(slot);
        }
        let operation = exec::start(&mut self.context, stream, stderr, ask)?;
        if let Task::Command(command) = &operation.task {
            self.by_pid.insert(command.pid, stream);
            self.session.opened(stream, Object::new().number("pid", command.pid).finish());
        }
        self.just_opened = (operation.input.is_none()).then_some(stream);
        self.admit(stream, operation);
        Ok(())
    }

    fn admit_worker(&mut self, stream: u32, operation: Operation) {
        if let Task::Worker(Worker { pid: Some(pid), .. }) = &operation.task {
            self.by_pid.insert(*pid, stream);
        }
        self.admit(stream, operation);
    }

    fn on_operation(&mut self, token: u64) {
        let (stream, role) = of_token(token);
        match role {
            Role::Input if self.is_connecting(stream) => self.on_connect(stream),
            Role::Input => self.take_input(stream),
            Role::Output => self.read_output(stream, 0),
            Role::Stderr => self.read_output(stream, 1),
            Role::Result => self.read_result(stream),
        }
    }

    fn drain_signals(&self) {
        let mut buffer = [0u8; 1024];
        // SAFETY: pointer and length describe the buffer. Empty is fine: wait4 tells what happened.
        unsafe { calls::read(self.signals.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    }

    /// Every child, also those that commands left behind.
    fn reap(&mut self) {
        self.drain_signals();
        while let Some((pid, exit)) = Exit::next() {
            if let Some(stream) = self.by_pid.remove(&pid) {
                self.on_exit(stream, exit);
            }
        }
    }
}

pub fn ok(json: &str) -> Vec<u8> {
    Object::new().raw("ok", json).finish().into_bytes()
}

fn check_head(stream: u32, head: wire::Head) -> Outcome<wire::Head> {
    if head.command.as_ref().is_some_and(|command| command.len() > COMMAND_BYTES_MAX) {
        return Err(Failure::invalid("command: at most 64 bytes"));
    }
    if head.stderr_stream.is_some_and(|stderr| stderr % 2 != 0 || stderr <= stream || head.op != "exec") {
        return Err(Failure::invalid("stderr_stream: the next even id, for exec only"));
    }
    Ok(head)
}
