"""The contrast test as a study: settings, protocol, page."""
