.PHONY: run test check bench chaos soak model mutants env lock clean

run test check bench chaos soak model mutants env lock clean:
	@python3 dev.py $@ $(if $(filter run,$@),$(BACKEND:%=--backend %)) $(ARGS)
