// Renders the seccomp programs that our sandboxes load as Go source, so that
// runsc need not compile them at every start (about 13 ms each time).
//
// The Go module of gVisor ships an empty table; upstream fills it in its Bazel
// build only. We keep just the programs our flags can select: systrap, no host
// network, no device proxies. Anything else falls back to compiling at start,
// which is upstream's own path, so a missing entry costs time and no safety.
package main

import (
	"fmt"
	"log"
	"os"
	"sort"
	"strings"

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
	// Registers the platforms; without it the list of programs is empty.
	_ "gvisor.dev/gvisor/runsc/cli/maincli"
)

var wanted = []string{
	`Platform="systrap"`,
	"HostNetwork=false",
	"NVProxy=false",
	"TPUProxy=false",
	"RDMAProxy=false",
}

func isWanted(program precompiledseccomp.Program) bool {
	for _, part := range wanted {
		if !strings.Contains(program.Name, part) {
			return false
		}
	}
	return true
}

func main() {
	all, err := config.PrecompiledPrograms()
	if err != nil {
		log.Fatalf("compiling the programs: %v", err)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })

	var out strings.Builder
	out.WriteString("package filter\n\n")
	out.WriteString("import \"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp\"\n\n")
	out.WriteString("func addPrecompiled(programs map[string]precompiledseccomp.Program) {\n")
	kept := 0
	for _, program := range all {
		if isWanted(program) {
			out.WriteString(program.Registration("\t", "precompiledseccomp", "programs"))
			out.WriteString("\n")
			kept++
		}
	}
	out.WriteString("}\n")
	if kept == 0 {
		log.Fatalf("none of %d programs has all of %v: upstream renamed its options", len(all), wanted)
	}
	if err := os.WriteFile(os.Args[1], []byte(out.String()), 0o644); err != nil {
		log.Fatal(err)
	}
	fmt.Fprintf(os.Stderr, "seccomp: kept %d of %d programs\n", kept, len(all))
}
