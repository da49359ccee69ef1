"""Reports: images, tables and pages made from maps and scores."""
