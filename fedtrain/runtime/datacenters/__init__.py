"""What a rank of a datacenter run does."""
