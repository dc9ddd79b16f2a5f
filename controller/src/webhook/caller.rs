//! Who calls, as far as it can be told: by address.

use std::net::{IpAddr, Ipv6Addr};

/// A caller. Behind one address may stand many (source NAT), and one may have many addresses; what is given to a caller
/// is a share for that reason, never all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Caller(IpAddr);

/// An IPv4 address is a caller, as is one that comes in IPv6's clothes; of IPv6 it is a /64, the least that a host is
/// given, in which it may take any address.
impl From<IpAddr> for Caller {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_caller() {
        let caller = |address: &str| Caller::from(address.parse::<IpAddr>().unwrap());
        for (one, other, same) in [
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.2", false),
            ("fd00:0:0:1::1", "fd00:0:0:1:ffff::2", true),
            ("fd00:0:0:1::1", "fd00:0:0:2::1", false),
        ] {
            assert_eq!(caller(one) == caller(other), same, "{one}, {other}");
        }
    }
}
