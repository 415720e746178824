"""What a site does: its supervisor, its masks, its updates in fewer bytes, its noise."""
