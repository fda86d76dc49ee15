# Stop with a message for people. The build back end repeats it as the last lines of its output.
function(knapspec_edge_fail message)
    string(STRIP "${message}" message)
    if(DEFINED ENV{KNAPSPEC_EDGE_REASON_FILE})
        file(WRITE "$ENV{KNAPSPEC_EDGE_REASON_FILE}" "${message}\n")
    endif()
    message(FATAL_ERROR "${message}")
endfunction()
