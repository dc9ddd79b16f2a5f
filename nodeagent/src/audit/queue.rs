//! Facts that nobody waits for, on their way into the log. While it takes no rows, facts that are true only once (those with
//! a key) wait: who holds a card follows from them. There are few of them, for no container starts meanwhile. The others,
//! such as what a minute brought, are lost.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use mullion_audit::Entry;
use tokio::sync::mpsc::UnboundedReceiver;

/// Facts in the order in which they were told.
#[derive(Debug, Default)]
pub(super) struct Queue {
    told: Option<UnboundedReceiver<Entry>>,
    /// With their numbers.
    waiting: VecDeque<(u64, Entry)>,
    next: u64,
}

/// What goes with the next request.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) entries: Vec<(u64, Entry)>,
    /// How many of them are lost where the log refuses them.
    pub(super) passing: usize,
}

impl Queue {
    /// Takes facts from here as well, until the last sender is gone.
    pub(super) fn listen(&mut self, told: UnboundedReceiver<Entry>) {
        self.take_told();
        self.told = Some(told);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Ready once a fact is told (`true`) or none can be any more.
    pub(super) fn poll_told(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        match self.told.as_mut().map(|told| told.poll_recv(cx)) {
            Some(Poll::Pending) => Poll::Pending,
            Some(Poll::Ready(Some(entry))) => {
                self.push(entry);
                Poll::Ready(true)
            }
            Some(Poll::Ready(None)) | None => Poll::Ready(false),
        }
    }

    /// All that was told and is not written. Those with a key stay until [`Self::done`]: written twice they add nothing.
    pub(super) fn due(&mut self) -> Due {
        self.take_told();
        let entries: Vec<_> = self.waiting.iter().cloned().collect();
        self.waiting.retain(|(_, entry)| entry.key.is_some());
        Due { passing: entries.len().saturating_sub(self.waiting.len()), entries }
    }

    /// They are written, or never will be.
    pub(super) fn done(&mut self, entries: &[(u64, Entry)]) {
        if let (Some((first, _)), Some((last, _))) = (entries.first(), entries.last()) {
            self.waiting.retain(|(number, _)| !(first..=last).contains(&number));
        }
    }

    fn take_told(&mut self) {
        while let Some(Ok(entry)) = self.told.as_mut().map(UnboundedReceiver::try_recv) {
            self.push(entry);
        }
    }

    fn push(&mut self, entry: Entry) {
        self.waiting.push_back((self.next, entry));
        self.next += 1;
    }
}
