"""A run as a page: live in a browser (`fedtrain dashboard`), and as one file (`fedtrain report`)."""
