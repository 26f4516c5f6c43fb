"""What a run recorded in its folder, read back; and the page that shows it."""
