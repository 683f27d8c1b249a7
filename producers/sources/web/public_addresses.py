"""Decides which IP addresses belong to the public internet.

The tables are IANA's special-purpose address registries, as they stood on 2026-07-18:
iana.org/assignments/iana-ipv4-special-registry and iana.org/assignments/iana-ipv6-special-registry.
Each row is (address block, name, whether the registry calls the block globally reachable). A block
whose column is empty or "N/A" counts as unreachable. To update the tables, copy the rows and change
the date.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

IPV4 = (
    ("0.0.0.0/8", "This network", False),
    ("0.0.0.0/32", "This host on this network", False),
    ("10.0.0.0/8", "Private-Use", False),
    ("100.64.0.0/10", "Shared Address Space", False),
    ("127.0.0.0/8", "Loopback", False),
    ("169.254.0.0/16", "Link Local", False),
    ("172.16.0.0/12", "Private-Use", False),
    ("192.0.0.0/24", "IETF Protocol Assignments", False),
    ("192.0.0.0/29", "IPv4 Service Continuity Prefix", False),
    ("192.0.0.8/32", "IPv4 dummy address", False),
    ("192.0.0.9/32", "Port Control Protocol Anycast", True),
    ("192.0.0.10/32", "Traversal Using Relays around NAT Anycast", True),
    ("192.0.0.170/32", "NAT64/DNS64 Discovery", False),
    ("192.0.0.171/32", "NAT64/DNS64 Discovery", False),
    ("192.0.2.0/24", "Documentation (TEST-NET-1)", False),
    ("192.31.196.0/24", "AS112-v4", True),
    ("192.52.193.0/24", "AMT", True),
    ("192.88.99.0/24", "Deprecated (6to4 Relay Anycast)", False),
    ("192.88.99.2/32", "6a44-relay anycast address", False),
    ("192.168.0.0/16", "Private-Use", False),
    ("192.175.48.0/24", "Direct Delegation AS112 Service", True),
    ("198.18.0.0/15", "Benchmarking", False),
    ("198.51.100.0/24", "Documentation (TEST-NET-2)", False),
    ("203.0.113.0/24", "Documentation (TEST-NET-3)", False),
    ("240.0.0.0/4", "Reserved", False),
    ("255.255.255.255/32", "Limited Broadcast", False),
)
IPV6 = (
    ("::1/128", "Loopback Address", False),
    ("::/128", "Unspecified Address", False),
    ("::ffff:0:0/96", "IPv4-mapped Address", False),
    ("64:ff9b::/96", "IPv4-IPv6 Translation", True),
    ("64:ff9b:1::/48", "IPv4-IPv6 Translation", False),
    ("100::/64", "Discard-Only Address Block", False),
    ("100:0:0:1::/64", "Dummy IPv6 Prefix", False),
    ("2001::/23", "IETF Protocol Assignments", False),
    ("2001::/32", "TEREDO", False),
    ("2001:1::1/128", "Port Control Protocol Anycast", True),
    ("2001:1::2/128", "Traversal Using Relays around NAT Anycast", True),
    ("2001:1::3/128", "DNS-SD Service Registration Protocol Anycast", True),
    ("2001:2::/48", "Benchmarking", False),
    ("2001:3::/32", "AMT", True),
    ("2001:4:112::/48", "AS112-v6", True),
    ("2001:10::/28", "Deprecated (previously ORCHID)", False),
    ("2001:20::/28", "ORCHIDv2", True),
    ("2001:30::/28", "Drone Remote ID Protocol Entity Tags (DETs) Prefix", True),
    ("2001:db8::/32", "Documentation", False),
    ("2002::/16", "6to4", False),
    ("2620:4f:8000::/48", "Direct Delegation AS112 Service", True),
    ("3fff::/20", "Documentation", False),
    ("5f00::/16", "Segment Routing (SRv6) SIDs", False),
    ("fc00::/7", "Unique-Local", False),
    ("fe80::/10", "Link-Local Unicast", False),
)

# These two blocks are not in the special-purpose registries: RFC 5771, and IANA's IPv6 address
# space.
MULTICAST = IPv4Network("224.0.0.0/4")
UNICAST = IPv6Network("2000::/3")  # IANA has assigned global unicast from no other block

Row = tuple[IPv4Network | IPv6Network, str, bool]
_ROWS: list[Row] = sorted(
    ((ip_network(block), name, reachable) for block, name, reachable in (*IPV4, *IPV6)),
    key=lambda row: -row[0].prefixlen,  # the most specific row decides
)


def special_row(ip: IPv4Address | IPv6Address) -> Row | None:
    """Return the most specific row of the registries that contains the address, or None."""
    return next((row for row in _ROWS if ip.version == row[0].version and ip in row[0]), None)


def embedded(ip: IPv4Address | IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which packets for an IPv6 address are finally sent, or None.

    The forms are IPv4-mapped, NAT64 (RFC 6052) and ISATAP (RFC 5214), which any prefix may contain.
    The registries call all blocks of 6to4, Teredo and local NAT64 unreachable. IPv4-compatible and
    IPv4-translated addresses lie outside the unicast block.
    """
    if isinstance(ip, IPv4Address):
        return None
    above, low = int(ip) >> 32, int(ip) & 0xFFFFFFFF
    isatap = above & 0xFFFFFFFF in (0x5EFE, 0x02005EFE)
    return IPv4Address(low) if isatap or above in (0xFFFF, 0x64FF9B << 64) else None


def is_public(ip: IPv4Address | IPv6Address) -> bool:
    """Return whether the address, and an IPv4 address embedded in it, are public."""
    inner = embedded(ip)
    if inner is not None and not is_public(inner):
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return True  # a mapped address stands for its IPv4 address
    row = special_row(ip)
    if row is not None:
        return row[2]
    return ip in UNICAST if isinstance(ip, IPv6Address) else ip not in MULTICAST
