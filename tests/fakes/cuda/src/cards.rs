//! The cards that this process sees.

use std::env;
use std::path::Path;

use fake_state::{Card, NodeState, STATE_ENV, Store, profile};

use crate::abi::Code;

const MIB: u64 = 1 << 20;

/// A visible card; its place in the list is its ordinal.
#[derive(Clone, Debug)]
pub(crate) struct CardInfo {
    /// Place in the state file, which is its place in the live region.
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) bus: String,
    /// Bytes of memory that programs may have: the card's memory without what the driver keeps.
    pub(crate) memory: u64,
    pub(crate) sms: u32,
    pub(crate) compute: (i32, i32),
    pub(crate) numa: Option<u32>,
}

/// The node's state file, or the cards of `FAKE_CUDA_CARDS`.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) state: NodeState,
    pub(crate) store: Option<Store>,
}

impl Node {
    pub(crate) fn find() -> Result<Self, Code> {
        if let Some(path) = env::var_os(STATE_ENV) {
            let store = Store::open(path).map_err(|_| Code::NO_DEVICE)?;
            let state = store.read().map_err(|_| Code::NO_DEVICE)?;
            return Ok(Self { state, store: Some(store) });
        }
        let cards = env::var("FAKE_CUDA_CARDS").unwrap_or_else(|_| "h100x2".to_owned());
        let state = profile::node(&cards, "built-in").map_err(|_| Code::NO_DEVICE)?;
        Ok(Self { state, store: None })
    }

    /// CUDA version: `FAKE_CUDA_VERSION`, or the state file's where there is one, or 12.9.
    pub(crate) fn version(&self) -> i32 {
        let asked = env::var("FAKE_CUDA_VERSION").ok().and_then(|v| v.parse().ok());
        let stated = self.store.as_ref().map(|_| self.state.driver.cuda);
        asked.or(stated).unwrap_or(12_090)
    }

    /// The cards in the order of their ordinals: what has a device node, then what `CUDA_VISIBLE_DEVICES` picks.
    pub(crate) fn visible(&self) -> Vec<CardInfo> {
        let listed: Vec<&Card> = self.state.listed().filter(|c| !c.lost).collect();
        let nodes = |c: &Card| Path::new(&format!("/dev/nvidia{}", c.minor)).exists();
        // In a container only some cards have a node, and the driver lists those.
        let needed = env::var_os("MULLION_FAKE_DEVICE_NODES").is_some_and(|v| v == "1");
        let present: Vec<&Card> = listed.into_iter().filter(|c| !needed || nodes(c)).collect();
        let picked = match env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => pick(&present, &list),
            Err(_) => present,
        };
        picked.into_iter().map(|c| self.info(c)).collect()
    }

    fn info(&self, card: &Card) -> CardInfo {
        let index = self.state.cards.iter().position(|c| c.uuid == card.uuid).unwrap_or(0);
        CardInfo {
            index,
            name: card.model.clone(),
            uuid: uuid_bytes(&card.uuid),
            bus: card.pci.bus_id.clone(),
            memory: card.memory_mib.saturating_sub(card.reserved_mib) * MIB,
            sms: card.sms,
            compute: card.compute,
            numa: card.numa_node,
        }
    }
}

/// Indices or prefixes of uuids, up to the first that names no card, as the driver reads the variable.
fn pick<'a>(cards: &[&'a Card], list: &str) -> Vec<&'a Card> {
    let mut picked: Vec<&Card> = Vec::new();
    for item in list.split(',').map(str::trim) {
        let found = match item.parse::<usize>() {
            Ok(index) => cards.get(index),
            Err(_) if item.starts_with("GPU-") => cards.iter().find(|c| c.uuid.starts_with(item)),
            Err(_) => None,
        };
        match found {
            // A card named twice makes the whole list invalid.
            Some(card) if picked.iter().any(|p| p.uuid == card.uuid) => return Vec::new(),
            Some(card) => picked.push(card),
            None => break,
        }
    }
    picked
}

/// The bytes of `GPU-xxxxxxxx-….`.
fn uuid_bytes(text: &str) -> [u8; 16] {
    let digits: Vec<u8> = text.trim_start_matches("GPU-").bytes().filter(u8::is_ascii_hexdigit).collect();
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = std::str::from_utf8(pair).ok().and_then(|p| u8::from_str_radix(p, 16).ok()).unwrap_or(0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_read_as_the_driver_does() {
        let node = profile::node("h100x4", "n").unwrap();
        let cards: Vec<&Card> = node.cards.iter().collect();
        let uuid = node.cards[2].uuid.clone();
        for (list, want) in [
            ("", vec![]),
            ("0", vec![0]),
            ("3,1", vec![3, 1]),
            ("1,9,0", vec![1]),
            ("1,-1,0", vec![1]),
            ("1,1", vec![]),
            (&uuid[..12], vec![2]),
            (&format!("{uuid},0"), vec![2, 0]),
            ("MIG-x", vec![]),
        ] {
            let got: Vec<u32> = pick(&cards, list).iter().map(|c| c.index).collect();
            assert_eq!(got, want, "{list}");
        }
    }
}
