//! Names that some rule could allow, and the addresses that stand for them. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::{Duration, Instant};

pub const NAMES_MAX: usize = 4_096;
const REFUSED_MAX: usize = 256;
/// The host is asked again after this: a rule may have come or gone.
const FRESH: Duration = Duration::from_secs(5);
const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 1]);

struct Known {
    number: u16,
    fresh_until: Instant,
}

#[derive(Default)]
pub struct Names {
    known: BTreeMap<Rc<str>, Known>,
    by_number: Vec<Rc<str>>,
    refused: BTreeMap<Box<str>, Instant>,
}

pub fn address(number: u16) -> Ipv4Addr {
    Ipv4Addr::from(FIRST + u32::from(number))
}

#[derive(Debug, PartialEq, Eq)]
pub enum Cached {
    Address(Ipv4Addr),
    Refused,
    Unknown,
}

impl Names {
    pub fn cached(&self, name: &str, now: Instant) -> Cached {
        match (self.known.get(name), self.refused.get(name)) {
            (Some(known), _) if known.fresh_until > now => Cached::Address(address(known.number)),
            (_, Some(until)) if *until > now => Cached::Refused,
            _ => Cached::Unknown,
        }
    }

    /// The name's number, the same for the whole boot; None: there are too many names.
    pub fn allow(&mut self, name: &str, now: Instant) -> Option<u16> {
        self.refused.remove(name);
        let fresh_until = now + FRESH;
        if let Some(known) = self.known.get_mut(name) {
            known.fresh_until = fresh_until;
            return Some(known.number);
        }
        if self.by_number.len() >= NAMES_MAX {
            return None;
        }
        let (number, name) = (self.by_number.len() as u16, Rc::<str>::from(name));
        self.by_number.push(name.clone());
        self.known.insert(name, Known { number, fresh_until });
        Some(number)
    }

    pub fn refuse(&mut self, name: &str, now: Instant) {
        if let Some(known) = self.known.get_mut(name) {
            known.fresh_until = now;
        }
        if self.refused.len() >= REFUSED_MAX {
            self.refused.retain(|_, until| *until > now);
        }
        if self.refused.len() < REFUSED_MAX {
            self.refused.insert(name.into(), now + FRESH);
        }
    }

    pub fn of(&self, number: u16) -> Option<&str> {
        self.by_number.get(usize::from(number)).map(AsRef::as_ref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_names_own() {
        let (mut names, now) = (Names::default(), Instant::now());
        assert_eq!(names.cached("a.example", now), Cached::Unknown);
        assert_eq!((names.allow("a.example", now), names.allow("b.example", now)), (Some(0), Some(1)));
        assert_eq!(names.cached("b.example", now), Cached::Address(Ipv4Addr::new(127, 64, 0, 2)));
        let later = now + FRESH;
        assert_eq!(names.cached("b.example", later), Cached::Unknown, "the host is asked again");
        names.refuse("b.example", later);
        assert_eq!(names.cached("b.example", later), Cached::Refused);
        assert_eq!(names.allow("b.example", later), Some(1), "the same number as before");
        assert_eq!(names.cached("b.example", later), Cached::Address(address(1)));
        assert_eq!((names.of(0), names.of(2)), (Some("a.example"), None));
    }

    #[test]
    fn everything_is_bounded() {
        let (mut names, now) = (Names::default(), Instant::now());
        for number in 0..NAMES_MAX + 10 {
            let allowed = names.allow(&format!("n{number}.example"), now);
            assert_eq!(allowed.is_some(), number < NAMES_MAX);
        }
        assert_eq!(address(NAMES_MAX as u16 - 1), Ipv4Addr::new(127, 64, 16, 0));
        for number in 0..2 * REFUSED_MAX {
            names.refuse(&format!("x{number}.example"), now);
        }
        assert_eq!(names.refused.len(), REFUSED_MAX);
        names.refuse("late.example", now + FRESH);
        assert_eq!(names.cached("late.example", now + FRESH), Cached::Refused);
    }
}
