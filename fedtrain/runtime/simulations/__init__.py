"""All sites, or all peers, on one machine."""
