//! Whether compressing pays: what it gains on the medium against what it costs, both as measured while running.
//!
//! A byte that is stored and loaded once takes `1/W + 1/M` seconds (W, M: what the medium writes and reads in a second), and
//! compressed to a part of `1/r` it takes `1/(r W) + 1/E + 1/(r M) + 1/D` (E, D: what the codec's threads encode and decode
//! in a second). Compressing pays while the second is less. What is not known yet is left out of both.

use std::time::Duration;

use ucm_infra::Mono;

/// Records that are compressed before anything is decided, and whenever it is tried again.
const TRIAL: u32 = 8;
/// Time between two trials while it does not pay.
const TRY_AGAIN: Duration = Duration::from_secs(60);
/// What must be gained before it is switched on again, so that it does not go to and fro.
const CLEARLY: f64 = 0.9;

/// When records are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// While that pays.
    Measured,
    /// Always: for the room that it saves.
    Always,
}

/// A rate or a ratio of two sums, of which the older parts fade: the last few dozens count.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Average {
    over: f64,
    under: f64,
}

impl Average {
    pub(super) fn add(&mut self, over: f64, under: f64) {
        const FADES: f64 = 31.0 / 32.0;
        self.over = self.over * FADES + over;
        self.under = self.under * FADES + under;
    }

    pub(super) fn get(self) -> Option<f64> {
        (self.over > 0.0 && self.under > 0.0).then(|| self.over / self.under)
    }
}

/// What is known: bytes of records in a second, and how many times shorter they become. `None`: not measured yet.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Figures {
    /// All encoding threads together.
    pub encode: Option<f64>,
    /// All decoding threads together.
    pub decode: Option<f64>,
    /// Length as used by length as stored.
    pub ratio: Option<f64>,
    /// The medium, writing.
    pub write: Option<f64>,
    /// The medium, reading.
    pub read: Option<f64>,
}

impl Figures {
    /// The time of a byte compressed by that of one as it is: below 1 it pays. `None` while too little is known.
    pub fn cost(&self) -> Option<f64> {
        let ratio = self.ratio?;
        let pairs = [(self.write, self.encode), (self.read, self.decode)];
        let (mut with, mut without) = (0.0, 0.0);
        for (medium, codec) in pairs {
            if let (Some(medium), Some(codec)) = (medium, codec) {
                with += 1.0 / (ratio * medium) + 1.0 / codec;
                without += 1.0 / medium;
            }
        }
        (without > 0.0).then(|| with / without)
    }

    /// The figures in words.
    pub(super) fn words(&self) -> String {
        let rate = |rate: Option<f64>| match rate {
            Some(rate) => format!("{:.0} MB/s", rate / 1e6),
            None => "unknown".to_owned(),
        };
        let ratio = self
            .ratio
            .map_or_else(|| "unknown".to_owned(), |ratio| format!("{ratio:.2}"));
        format!(
            "the medium writes {} and reads {}, the codec encodes {} and decodes {}, ratio {ratio}",
            rate(self.write),
            rate(self.read),
            rate(self.encode),
            rate(self.decode)
        )
    }
}

/// Switches compression on and off.
#[derive(Debug)]
pub(super) struct Worth {
    when: When,
    on: bool,
    /// Records of the current trial that are still to be compressed.
    trial: u32,
    next_trial: Mono,
}

/// Whether the next record is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It is written as it is.
    AsIs,
    Compress,
    /// Compressed, and decoded again to see what that takes.
    Try,
}

impl Worth {
    pub(super) fn new(when: When) -> Self {
        Self {
            when,
            on: true,
            trial: TRIAL,
            next_trial: Mono(0),
        }
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// What becomes of the next record.
    pub(super) fn next(&mut self, now: Mono) -> Next {
        if self.trial > 0 {
            self.trial -= 1;
            return Next::Try;
        }
        if self.on {
            return Next::Compress;
        }
        if now < self.next_trial {
            return Next::AsIs;
        }
        self.next_trial = now.after(TRY_AGAIN);
        self.trial = TRIAL - 1;
        Next::Try
    }

    /// Thinks again, now that more is known; true if that changed something.
    pub(super) fn judge(&mut self, figures: &Figures, now: Mono) -> bool {
        if self.when == When::Always || self.trial > 0 {
            return false;
        }
        let Some(cost) = figures.cost() else { return false };
        let on = if self.on { cost < 1.0 } else { cost < CLEARLY };
        if on == self.on {
            return false;
        }
        self.on = on;
        self.next_trial = now.after(TRY_AGAIN);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn figures(write: f64, read: f64, ratio: f64) -> Figures {
        Figures {
            encode: Some(1000.0 * MB),
            decode: Some(2000.0 * MB),
            ratio: Some(ratio),
            write: Some(write * MB),
            read: Some(read * MB),
        }
    }

    fn tried(when: When) -> Worth {
        let mut worth = Worth::new(when);
        (0..TRIAL).for_each(|_| assert_eq!(worth.next(Mono(0)), Next::Try));
        worth
    }

    #[test]
    fn the_formula_by_hand() {
        // 1/(1.5 * 100) + 1/1000 + 1/(1.5 * 200) + 1/2000 by 1/100 + 1/200.
        let cost = figures(100.0, 200.0, 1.5).cost().unwrap();
        assert!((cost - (0.01 / 1.5 + 0.001 + 0.005 / 1.5 + 0.0005) / 0.015).abs() < 1e-9);
        let unread = Figures {
            read: None,
            ..figures(100.0, 0.0, 2.0)
        };
        assert!(
            (unread.cost().unwrap() - (0.005 + 0.001) / 0.01).abs() < 1e-9,
            "what is known counts"
        );
        let unknown = Figures {
            ratio: None,
            ..figures(100.0, 100.0, 1.0)
        };
        assert_eq!(unknown.cost(), None);
        assert_eq!(
            Figures {
                ratio: Some(2.0),
                ..Figures::default()
            }
            .cost(),
            None
        );
    }

    #[test]
    fn a_slow_medium_pays_and_a_fast_one_does_not() {
        let mut worth = tried(When::Measured);
        assert!(!worth.judge(&figures(100.0, 200.0, 1.4), Mono(1)));
        assert_eq!(worth.next(Mono(1)), Next::Compress);
        assert!(
            worth.judge(&figures(2000.0, 5000.0, 1.4), Mono(2)),
            "it is off, and that is told"
        );
        assert!(!worth.judge(&figures(2000.0, 5000.0, 1.4), Mono(3)), "once");
        assert_eq!(worth.next(Mono(3)), Next::AsIs);
    }

    #[test]
    fn what_hardly_shrinks_never_pays() {
        let mut worth = tried(When::Measured);
        assert!(worth.judge(&figures(50.0, 50.0, 1.02), Mono(1)));
    }

    #[test]
    fn it_is_tried_again_now_and_then_and_not_for_a_hair() {
        let mut worth = tried(When::Measured);
        worth.judge(&figures(2000.0, 5000.0, 1.4), Mono(0));
        let later = Mono(0).after(TRY_AGAIN);
        assert_eq!(worth.next(Mono(later.0 - 1)), Next::AsIs);
        for _ in 0..TRIAL {
            assert_eq!(worth.next(later), Next::Try);
            assert!(
                !worth.judge(&figures(1.0, 1.0, 1.4), later) || worth.trial == 0,
                "not before it is over"
            );
        }
        let mut worth = tried(When::Measured);
        worth.judge(&figures(2000.0, 5000.0, 1.4), Mono(0));
        let hair = Figures {
            read: None,
            ..figures(270.0, 0.0, 1.4)
        };
        assert!((0.9..1.0).contains(&hair.cost().unwrap()));
        assert!(!worth.judge(&hair, Mono(1)) && !worth.is_on());
        assert!(worth.judge(&figures(50.0, 50.0, 1.4), Mono(2)) && worth.is_on());
    }

    #[test]
    fn always_is_always() {
        let mut worth = tried(When::Always);
        assert!(!worth.judge(&figures(2000.0, 5000.0, 1.01), Mono(0)));
        assert_eq!(worth.next(Mono(0)), Next::Compress);
    }

    #[test]
    fn averages_follow_what_is_new() {
        let mut average = Average::default();
        assert_eq!(average.get(), None);
        (0..100).for_each(|_| average.add(10.0, 1.0));
        assert!((average.get().unwrap() - 10.0).abs() < 1e-6);
        (0..200).for_each(|_| average.add(2.0, 1.0));
        assert!((average.get().unwrap() - 2.0).abs() < 0.1);
    }
}
