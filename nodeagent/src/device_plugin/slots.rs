//! How many slots the kubelet is offered, and which.
//!
//! A slot is a token; it belongs to no card. A slot in use is never hidden and never unhealthy: after its own
//! restart the kubelet would fail that pod for good, also when its card is fine. What a failed card takes away
//! is hidden from the free ones.

use std::collections::BTreeSet;

/// Highest number of slots of a node: four digits in a name.
pub const MOST: u32 = 10_000;

/// The name of a slot.
#[must_use]
pub fn name(number: u32) -> String {
    format!("slot-{number:04}")
}

/// Whether `id` is a name that [`name`] gives.
#[must_use]
pub fn is_name(id: &str) -> bool {
    id.strip_prefix("slot-").is_some_and(|n| n.len() == 4 && n.bytes().all(|b| b.is_ascii_digit()))
}

/// What the cards of a node offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Slots of all cards.
    pub total: u32,
    /// Slots of the cards that can take containers now.
    pub usable: u32,
}

/// The slots to offer, sorted: every slot in use, and as many free ones, lowest first, as it takes until there are
/// `max(slots in use, usable)`.
#[must_use]
pub fn plan(offer: Offer, in_use: &BTreeSet<String>) -> Vec<String> {
    let in_use: BTreeSet<&String> = in_use.iter().filter(|id| is_name(id)).collect();
    let usable = usize::try_from(offer.usable.min(offer.total).min(MOST)).unwrap_or(usize::MAX);
    let missing = usable.saturating_sub(in_use.len());
    let free = (0..MOST).map(name).filter(|id| !in_use.contains(id)).take(missing);
    let mut slots: Vec<String> = in_use.iter().map(|&id| id.clone()).chain(free).collect();
    slots.sort_unstable();
    slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(numbers: &[u32]) -> BTreeSet<String> {
        numbers.iter().map(|n| name(*n)).collect()
    }

    #[test]
    fn the_count_is_what_usable_cards_offer_but_never_below_what_is_in_use() {
        for (case, total, usable, in_use, want) in [
            ("nothing known yet", 0, 0, vec![], vec![]),
            ("all well", 4, 4, vec![1], vec![0, 1, 2, 3]),
            ("a card failed, free slots go", 4, 2, vec![3], vec![0, 3]),
            ("a card failed, all are in use", 4, 2, vec![0, 2, 3], vec![0, 2, 3]),
            ("no card answers", 4, 0, vec![2], vec![2]),
            ("the admin lowered the split", 2, 2, vec![7], vec![0, 7]),
            ("more usable than there are", 2, 4, vec![], vec![0, 1]),
        ] {
            let want: Vec<_> = want.into_iter().map(name).collect();
            assert_eq!(plan(Offer { total, usable }, &ids(&in_use)), want, "{case}");
        }
    }

    #[test]
    fn a_foreign_id_of_a_former_plugin_is_not_offered() {
        let mut in_use = ids(&[0]);
        in_use.insert("GPU-1234-0".to_owned());
        in_use.insert("slot-00a1".to_owned());
        assert_eq!(plan(Offer { total: 2, usable: 2 }, &in_use), [name(0), name(1)]);
    }

    proptest! {
        #[test]
        fn in_use_is_never_hidden_and_the_count_is_exact(
            total in 0_u32..200, usable in 0_u32..200, in_use in proptest::collection::btree_set(0_u32..300, 0..60),
        ) {
            let in_use: BTreeSet<String> = in_use.into_iter().map(name).collect();
            let slots = plan(Offer { total, usable }, &in_use);
            prop_assert!(in_use.iter().all(|id| slots.contains(id)));
            prop_assert_eq!(slots.len(), in_use.len().max(usable.min(total) as usize));
            prop_assert!(slots.windows(2).all(|w| w[0] < w[1]), "sorted, each once");
        }

        #[test]
        fn a_card_that_comes_back_gives_the_same_slots(
            total in 0_u32..100, lost in 0_u32..100, in_use in proptest::collection::btree_set(0_u32..100, 0..60),
        ) {
            let in_use: BTreeSet<String> = in_use.into_iter().map(name).collect();
            let before = plan(Offer { total, usable: total }, &in_use);
            let during = plan(Offer { total, usable: total.saturating_sub(lost) }, &in_use);
            prop_assert!(during.iter().all(|id| before.contains(id)), "hiding never shows a new one");
        }
    }
}
