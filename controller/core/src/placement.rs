//! Which cards a pod gets on a node.
//!
//! One function for filter, bind, explain and tests: what [`fit`] promised it gives again as long as no new fact
//! arrives.

mod search;

use crate::charge::{Short, phases};
use crate::facts::{ContainerGrant, ContainerKind, DeviceGrant};
use crate::ledger::{Ledger, Node};
use crate::refusal::{Code, Detail, Refusal};
use crate::request::{ContainerWish, PodRequest};
use crate::score::{CardScore, Fill, NodeScore};
use crate::units::NodeName;
use search::{Board, closed, memory_on};

/// The cards for a pod on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// What each container gets, in spec order; goes into the allocation as it is.
    pub containers: Vec<ContainerGrant>,
    /// Each card that is used, by index, and how well it suited.
    pub cards: Vec<CardScore>,
    /// How well the node suits.
    pub score: NodeScore,
}

/// A container that finds too few cards even by itself.
struct Miss {
    /// Its position.
    container: usize,
    /// How many cards it needs.
    wanted: usize,
    /// How many it finds.
    fitting: usize,
    /// Of the open cards that failed it: the rule that comes latest, and the card that came closest to it.
    nearest: Option<Short>,
}

/// A request made ready for many nodes: work that does not depend on the node is done once.
#[derive(Clone, Debug)]
pub struct Shape<'a> {
    request: &'a PodRequest,
    /// Containers by phase.
    phases: Vec<Vec<usize>>,
    /// Phases by container.
    of_container: Vec<Vec<usize>>,
    /// Sidecars and apps first, since they stay; then the init containers, each beside those.
    order: Vec<usize>,
    slots: u64,
    /// No two containers ever run at the same time: then the first way that is tried is as good as any.
    separate: bool,
}

impl<'a> Shape<'a> {
    /// Prepares `request`.
    #[must_use]
    pub fn new(request: &'a PodRequest) -> Self {
        let kinds = || request.containers.iter().map(|c| c.kind);
        let phases = phases(kinds());
        let containers = 0..request.containers.len();
        let of_container = containers
            .clone()
            .map(|c| (0..phases.len()).filter(|&p| phases[p].contains(&c)).collect())
            .collect();
        let (inits, lasting): (Vec<usize>, Vec<usize>) =
            containers.partition(|&c| request.containers[c].kind == ContainerKind::Init);
        let order = lasting.into_iter().chain(inits).collect();
        let separate = phases.iter().all(|phase| phase.len() <= 1);
        Self { request, phases, of_container, order, slots: request.slots(), separate }
    }

    /// Decides the cards on `node`.
    ///
    /// # Errors
    /// A [`Refusal`] with the first rule that stands in the way and its numbers.
    pub fn fit(&self, ledger: &Ledger, node: &NodeName) -> Result<Placement, Refusal> {
        let state = self.open_node(ledger, node)?;
        match self.place(state) {
            Some(board) => Ok(self.placement(state, &board)),
            None => Err(self.refusal(state, node)),
        }
    }

    /// Whether the pod fits on `node` and how well: [`Self::fit`] without the cards, for filter and prioritize.
    ///
    /// # Errors
    /// The code of the [`Refusal`] that [`Self::fit`] would give.
    pub fn check(&self, ledger: &Ledger, node: &NodeName) -> Result<NodeScore, Code> {
        let state = self.usable_node(ledger, node).map_err(|(code, _)| code)?;
        match self.place(state) {
            Some(board) => Ok(self.node_score(state, &board)),
            None => Err(self.why(state).0),
        }
    }

    fn open_node<'n>(&self, ledger: &'n Ledger, node: &NodeName) -> Result<&'n Node, Refusal> {
        self.usable_node(ledger, node).map_err(|(code, best)| {
            let (asked, best) = if code == Code::SlotsTaken { (self.slots, best) } else { (0, 0) };
            let cards = ledger.state(node).map_or(&[][..], |s| &s.cards);
            let detail = Detail { asked, best, ..count_cards(cards.iter().map(|c| &c.fact)) };
            Refusal { code, node: node.clone(), detail }
        })
    }

    /// The checks that look at the node alone, in the catalogue's order; with a refusal, the free slots.
    fn usable_node<'n>(&self, ledger: &'n Ledger, node: &NodeName) -> Result<&'n Node, (Code, u64)> {
        let Some(state) = ledger.state(node) else { return Err((Code::NodeUnknown, 0)) };
        let (Some(fact), Some(kube)) = (&state.fact, &state.kube) else {
            return Err((Code::NodeUnknown, 0));
        };
        let free = kube.allocatable_slots.saturating_sub(state.slots_used);
        for (code, hit) in [
            (Code::NodeReplaced, fact.node_uid != kube.uid),
            (Code::NodeClosed, fact.cordoned),
            (Code::HoldingsUnknown, ledger.unplaced() > 0 || !state.unaccounted.is_empty()),
            (Code::DriverNotReady, !fact.driver_ready),
            (Code::PluginDown, kube.allocatable_slots == 0),
            (Code::SlotsTaken, free < self.slots),
        ] {
            if hit {
                return Err((code, free));
            }
        }
        Ok(state)
    }

    /// The way that is taken, if there is one.
    fn place<'b>(&'b self, state: &'b Node) -> Option<Board<'b>> {
        let mut board = Board::new(self, &state.cards);
        if board.greedy() || (!self.separate && self.short_alone(&board).is_none() && board.exact()) {
            return Some(board);
        }
        None
    }

    fn placement(&self, state: &Node, board: &Board) -> Placement {
        let grant = |(wish, chosen): (&ContainerWish, &Vec<usize>)| {
            let mut chosen = chosen.clone();
            // The container sees its cards by index, whatever order they were chosen in.
            chosen.sort_unstable();
            let device = |card: usize| {
                let fact = &board.cards[card].fact;
                let memory = memory_on(fact, &wish.request);
                DeviceGrant { uuid: fact.uuid.clone(), memory, cores: wish.request.cores }
            };
            let devices = chosen.into_iter().map(device).collect();
            ContainerGrant { name: wish.name.clone(), kind: wish.kind, devices }
        };
        let containers = self.request.containers.iter().zip(&board.chosen).map(grant).collect();
        let cards = (0..board.cards.len())
            .filter(|&card| board.peak(card).slots > 0)
            .map(|card| {
                let (fact, used) = (&board.cards[card].fact, &board.cards[card].used);
                let fill = Fill::of_card(fact, &used.and(board.peak(card)));
                fill.card_score(self.request.card_policy, fact.uuid.clone())
            })
            .collect();
        Placement { containers, cards, score: self.node_score(state, board) }
    }

    /// The node's score with the pod on it, over all of its cards.
    fn node_score(&self, state: &Node, board: &Board) -> NodeScore {
        let mut fill = Fill::default();
        for card in &state.cards {
            fill.add(Fill::of_card(&card.fact, &card.used));
        }
        for card in 0..board.cards.len() {
            fill.use_more(&board.peak(card));
        }
        fill.node_score(self.request.node_policy)
    }

    /// The first container that finds too few cards even by itself.
    fn short_alone(&self, board: &Board) -> Option<Miss> {
        (0..self.request.containers.len()).find_map(|container| {
            let mut fitting = 0;
            let mut miss: Option<Short> = None;
            for card in 0..board.cards.len() {
                match board.alone(container, card) {
                    Ok(()) => fitting += 1,
                    Err(short) => {
                        let nearer = |m: Short| (short.code, short.free) > (m.code, m.free);
                        if miss.is_none_or(nearer) {
                            miss = Some(short);
                        }
                    }
                }
            }
            let wanted = self.request.containers[container].request.count as usize;
            (fitting < wanted).then_some(Miss { container, wanted, fitting, nearest: miss })
        })
    }

    /// Why no card, or no set of cards, was found; with the container that finds too few cards by itself.
    fn why(&self, state: &Node) -> (Code, Option<Miss>) {
        let board = Board::new(self, &state.cards);
        let Some(miss) = self.short_alone(&board) else { return (Code::TooFewTogether, None) };
        let code = if state.cards.len() < miss.wanted {
            Code::TooFewCards
        } else if let Some(short) = miss.nearest {
            short.code
        } else {
            state.cards.iter().filter_map(|c| closed(&c.fact)).max().unwrap_or(Code::TooFewCards)
        };
        (code, Some(miss))
    }

    fn refusal(&self, state: &Node, node: &NodeName) -> Refusal {
        let (code, miss) = self.why(state);
        let mut detail = count_cards(state.cards.iter().map(|c| &c.fact));
        if let Some(miss) = miss {
            let wish = &self.request.containers[miss.container];
            detail.container = Some(wish.name.clone());
            detail.cards_asked = wish.request.count;
            detail.cards_fitting = u32::try_from(miss.fitting).unwrap_or(u32::MAX);
            if let Some(short) = miss.nearest {
                (detail.asked, detail.best) = (short.asked, short.free);
            }
        }
        Refusal { code, node: node.clone(), detail }
    }
}

/// How many cards there are, and how many of them are healthy.
fn count_cards<'a>(cards: impl Iterator<Item = &'a crate::facts::CardFact>) -> Detail {
    let mut detail = Detail::default();
    for card in cards {
        detail.cards_total += 1;
        detail.cards_healthy += u32::from(card.healthy);
    }
    detail
}

/// Decides the cards for a pod on `node`, or says why it cannot go there.
///
/// Each container gets distinct cards. Sidecars and apps are placed first, then each init container where the
/// pod's peak rises least; the pod's card policy orders the cards, ties go by index and uuid. When that way fails
/// for a pod with several containers at a time, the others are tried too, so that a refusal is right.
///
/// # Errors
/// A [`Refusal`]: the first rule that stands in the way, with the numbers.
pub fn fit(request: &PodRequest, ledger: &Ledger, node: &NodeName) -> Result<Placement, Refusal> {
    Shape::new(request).fit(ledger, node)
}
