"""The examples, installed and run as their READMEs say."""
