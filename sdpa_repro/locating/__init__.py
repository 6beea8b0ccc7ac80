"""Where a padded and an unpadded run of the same prompt part: a sweep over pads and lengths, then stage by stage."""
