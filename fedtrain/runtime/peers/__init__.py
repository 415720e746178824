"""What a peer of a gossip run does."""
